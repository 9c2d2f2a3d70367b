"""Resource-constrained scheduling on lanes, a library that does not depend on the compiler."""
