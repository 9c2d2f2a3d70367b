"""Several processes of one job: what they agree on, so that all of them run the same programs."""
