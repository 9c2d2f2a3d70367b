"""Dimensions of inputs whose size is a symbol while a graph is traced."""

from __future__ import annotations

import torch
from torch import fx


def follow_dimension(tensor: torch.Tensor, dimension: int) -> None:
    """Let Dynamo trace `tensor` with a symbol for the size of a dimension; code that needs the number still gets it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def find_size(graph_module: fx.GraphModule, tensor: torch.Tensor, dimension: int) -> int | torch.SymInt | None:
    """Return the size of a dimension of a real tensor in a Dynamo graph; None if the graph does not take the tensor.

    Read the expression of a `SymInt` only after the compile: tracing may find that the size is fixed.
    """
    for node in graph_module.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and argument.example is tensor and argument.fake_tensor is not None:
            size: int | torch.SymInt = argument.fake_tensor.shape[dimension]
            return size
    return None


def has_sizes(value: object) -> bool:
    """Whether an input of a graph, as it was traced, is a size that changes, or a tensor with such sizes."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)
