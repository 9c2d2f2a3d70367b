"""Helpers of benchmarks: cases in processes of their own, results, growth, whole steps, and kernels of a GPU."""
