"""What outlives the process: plans, and what was found out by measuring."""
