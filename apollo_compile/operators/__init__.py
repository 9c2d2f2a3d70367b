"""Properties of ATen operators: their work, their side effects, and the arguments that they write to."""
