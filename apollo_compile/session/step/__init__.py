"""The whole training step: micro-batches linked into one graph, its program, and what runs it."""
