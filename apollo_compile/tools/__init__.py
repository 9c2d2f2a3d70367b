"""What people call: the command line, dry runs, comparisons, measurements, and the doctor."""
