"""How benchmarks run: one case after the other in processes of their own, and what a GPU tells of kernels."""
