"""Several ranks: agreement on plans, balanced data loading, and encoders in the bubbles of pipelines."""
