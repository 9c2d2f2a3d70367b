"""Resizes of storages that AOTAutograd applies to another tensor than the program did.

    settle_resizes(graph)    in place, on a graph after AOTAutograd and before Inductor's passes

`x.untyped_storage().resize_(0)` frees the memory of a tensor in the middle of a program, and a resize to another size
allocates it again; FSDP does so around every layer. AOTAutograd makes everything else functional and leaves the resize
in place. So the resize applies to the node that represents the tensor there, and if the tensor was written to before,
that is the new value: `resize_storage_bytes_(value, 0)` frees memory that is copied into the tensor at the end of the
graph, which crashes, with Inductor alone too.

Here a resize of an input is applied to that input, and any other is dropped: memory that the graph allocated is freed
after its last reader anyway. An input that is without memory at the end of the graph is not written to.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from apollo_compile.operators.writes import frees_storage, is_view, resizes_storage

_copy = torch.ops.aten.copy_.default


def settle_resizes(graph: fx.Graph) -> None:
    """Make every resize one of an input's storage, or drop it."""
    memories: dict[fx.Node, fx.Node] = {}
    """By node, the node that allocated the memory of its value."""
    resizes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    """By memory, in order."""
    copies: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    """By memory, where it is copied into an input."""
    for node in graph.nodes:
        first: Any = node.args[0] if node.args else None
        is_of_first = is_view(node) and (node.target is not operator.getitem or is_view(first))  # else it is a result
        memories[node] = memories[first] if is_of_first else node
        if resizes_storage(node):
            resizes[memories[first]].append(node)
        elif node.target is _copy and isinstance(node.args[1], fx.Node):
            copies[memories[node.args[1]]].append(node)
    for memory, found in resizes.items():
        if memory.op != "placeholder" and frees_storage(found[-1]):
            for copy in copies[memory]:
                _free_instead(copy, memories, found[-1])
        for node in found:
            if memory.op == "placeholder":
                node.update_arg(0, memory)
            else:
                graph.erase_node(node)


def _free_instead(copy: Any, memories: Mapping[fx.Node, fx.Node], resize: fx.Node) -> None:
    """Free the input that `copy` writes to, at the place of `resize`."""
    with copy.graph.inserting_before(resize):
        copy.graph.create_node("call_function", resize.target, (memories[copy.args[0]], *resize.args[1:]))
    copy.replace_all_uses_with(copy.args[0])
    copy.graph.erase_node(copy)
