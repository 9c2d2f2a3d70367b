"""Reads of an input that torch moves after the graph's write to it.

    keep_reads(graph)     in place, on a graph after AOTAutograd and before Inductor's passes

A forward may write to a buffer after it has used it: a queue of keys, a codebook, a teacher's weights. AOTAutograd
makes the graph functional and puts the write, a `copy_`, at its very end. To later passes the buffer seems to keep its
value, and two of them become wrong. Inductor's pass that removes no-op operators drops a copy of the buffer and lets
readers of the copy read the buffer instead, even those after the write; and the min-cut partitioner assumes that the
backward may read an input at any time, so it saves the buffer and recomputes in the backward what the forward computed
from it. In both cases the backward, or a later write, sees the new value: a wrong gradient, without an error.

So an operator that only copies such a buffer gets a `prims.clone` to copy from, which no pass drops, and values that
are computed from the buffer are marked as saved, not recomputed. The cost is that of eager PyTorch: one saved tensor
per read that the backward needs.

A backward that reads the buffer itself is left alone: eager PyTorch refuses such a program.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from apollo_compile.operators.writes import frees_storage, is_view, written_by
from apollo_compile.torch_bridge.upstream_bugs.lost_copies import copied_by, keep_copy


def keep_reads(graph: fx.Graph) -> None:
    """Keep every read of memory that the graph writes to at its place, in the forward.

    Arguments:
        graph: forward and backward together, or an inference graph.
    """
    overwritten = _overwritten(graph)
    for node in list(_reads(graph, overwritten)):
        source = copied_by(node)
        kept = keep_copy(graph, node, source) if source is not None and source in overwritten else node
        kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _overwritten(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the inputs that the graph writes to or shares freed memory with, and all views of them."""
    views: dict[fx.Node, fx.Node] = {}
    """The input that a node is a view of."""
    written: set[fx.Node] = set()
    freed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            views[node] = node
        memories = {views[value] for value in written_by(node) if value in views}
        (freed if frees_storage(node) else written).update(memories)
        if is_view(node) and node.args[0] in views:
            views[node] = views[node.args[0]]
    storages = set(map(_storage_of, freed))
    written |= {memory for memory in views.values() if _storage_of(memory) in storages}
    return frozenset(node for node, memory in views.items() if memory in written)


def _storage_of(node: fx.Node) -> int | None:
    """Return an id of the storage that an input had in the trace; None if it is not a strided tensor."""
    value = node.meta["val"]
    has_storage = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if has_storage else None


def _reads(graph: fx.Graph, overwritten: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that read overwritten memory and have memory of their own."""
    for node in graph.nodes:
        if node.op != "call_function" or node in overwritten or written_by(node):
            continue
        reads = any(argument in overwritten for argument in node.all_input_nodes)
        if reads and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            yield node
