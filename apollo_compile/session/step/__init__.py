"""Whole training steps: micro-batches linked into one graph, its program, and the tuner of its variants."""
