"""User-facing tools: the command line, dry runs, comparisons, measurements, and the doctor."""
