"""Modules of a model on groups of devices: plan, draw and run them on torch.distributed."""
