"""Writes in place to tensors whose elements share memory, such as expanded ones.

    write_to_copies(graph)    in place, on a graph after AOTAutograd and before Inductor's passes

Inductor replaces `index_put` by `index_put_` if nothing reads the old values later. It does so too where elements of
the tensor share memory, and a write to one of them changes all: `t[mask] = 0` before a sum has a gradient of this kind.
Values are silently wrong, and the output keeps a stride of zero. Here such a write goes to a `prims.clone`.
"""

from __future__ import annotations

import torch
from torch import fx

_WRITES = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def write_to_copies(graph: fx.Graph) -> None:
    """Let operators that Inductor may run in place write to a tensor without shared memory."""
    for target in _WRITES:
        for node in graph.find_nodes(op="call_function", target=target):
            if _shares_memory(node.args[0].meta["val"]):
                with graph.inserting_before(node):
                    copy = graph.call_function(torch.ops.prims.clone.default, (node.args[0],))
                copy.meta = dict(node.meta)
                node.update_arg(0, copy)


def _shares_memory(value: torch.Tensor) -> bool:
    """Whether two elements may be at the same place; dynamic strides are left out, so that no guard is added."""
    sizes = [size if isinstance(size, int) else 2 for size in value.shape]
    reach = 0  # of the smaller strides
    for stride, size in sorted(pair for pair in zip(value.stride(), sizes, strict=True) if isinstance(pair[0], int)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
