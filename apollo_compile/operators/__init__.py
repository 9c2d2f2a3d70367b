"""What is known of ATen operators: the work they do, and the arguments that they write to."""
