"""What work takes how long: formulas of work, and the roofline."""
