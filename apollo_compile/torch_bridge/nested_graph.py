"""Run a graph inside of a `torch.autograd.Function`, forward and backward, as if it were a part of the graph around it.

call_with_copies(module, copies, args, kwargs) -> outputs;  run_nested(ctx, outputs, leaves, copies)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from apollo_compile.torch_bridge.private_attributes import keeps_graph, reaches


def call_with_copies(
    module: nn.Module, copies: dict[str, torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a module with copies of its parameters that share their memory; `.data` set on a copy is the parameter's."""
    found = torch.func.functional_call(module, copies, tuple(args), kwargs)
    for name, own in module.named_parameters() if copies else ():
        if name in copies and not isinstance(own, DTensor) and own.data_ptr() != copies[name].data_ptr():
            own.data = copies[name].data
    return found


def run_nested(
    ctx: Any,
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Add gradients to `.grad` of the leaves; the graph is kept if the outer backward keeps its own.

    Arguments:
        ctx: of the function, whose first input is a leaf that requires a gradient: `torch.autograd.grad` does not get
            to it, and the nested backward stops at the leaves then.
        outputs: tensors of the graph with their gradients; nothing is run for none.
        leaves: tensors with which the graph begins.
        copies: parameters, and leaves in their place. A reentrant checkpoint computes again with the parameter itself;
            its gradient is added to that of the leaf.
    """
    before = [parameter.grad for parameter, _ in copies]
    for parameter, _ in copies:
        parameter.grad = None
    try:
        if outputs:
            values, grads = zip(*outputs, strict=True)
            torch.autograd.backward(values, grads, retain_graph=keeps_graph(), inputs=None if reaches(ctx) else leaves)
        for parameter, leaf in copies:
            if parameter.grad is not None:
                leaf.grad = parameter.grad if leaf.grad is None else leaf.grad + parameter.grad
    finally:
        for (parameter, _), kept in zip(copies, before, strict=True):
            parameter.grad = kept
