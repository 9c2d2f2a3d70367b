"""Resource-constrained scheduling on lanes: a library that knows nothing of the compiler."""
