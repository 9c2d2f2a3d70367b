"""Plan, simulate and run jobs on a cluster by estimates of their steps; no part of the compiler."""
