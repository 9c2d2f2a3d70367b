"""Agreement between the ranks of one job, so that all of them run the same programs."""
