"""Inputs that a graph writes to: whatever reads one before the write, reads it in the forward.

    keep_reads(graph, copied_by)    in place, on a graph after AOTAutograd and before Inductor's passes

Note [Reads before writes]
    A forward may write to a buffer after it has used it: a queue of keys, a codebook, a teacher's weights. AOTAutograd
    makes the graph functional and puts the write, a `copy_`, at its very end. From there on the buffer looks as if it
    kept its value, and two things that Inductor does become wrong. Its pass against operators without effect drops a
    copy of the buffer and lets readers of the copy read the buffer instead, also those behind the write; and the
    min-cut partitioner takes an input for something that the backward may read at any time, so it saves the buffer and
    computes again what the forward made of it. Either way the backward, or a later write, sees the new value: a wrong
    gradient, without a word.

    So an operator that only copies such a memory gets a `prims.clone` to copy from, which no pass drops, and what is
    made of the memory is marked to be saved instead of computed again. It costs what eager PyTorch spends: one saved
    tensor per read that the backward needs.

    A backward that reads the buffer itself is left alone: eager PyTorch refuses such a program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def keep_reads(graph: fx.Graph, copied_by: Callable[[fx.Node], fx.Node | None]) -> None:
    """Make every read of memory that the graph writes to happen where it is, in the forward.

    Arguments:
        graph: forward and backward together, or an inference graph.
        copied_by: returns the argument that a node may turn out to be nothing but a copy of; None for other nodes.
    """
    overwritten = _overwritten(graph)
    for node in list(_reads(graph, overwritten)):
        source = copied_by(node)
        if source is not None and source in overwritten and _lie_alike(node, source):
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.prims.clone.default, (source,))
            copy.meta = {**node.meta, "val": node.meta["val"]}
            node.replace_input_with(source, copy)
            node = copy
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _overwritten(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the inputs that the graph writes to, and all views of them."""
    views: dict[fx.Node, fx.Node] = {}
    """The input that a node is a view of."""
    written = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            views[node] = node
        elif node.target is torch.ops.aten.copy_.default:
            written.add(views.get(node.args[0]))
        elif _is_view(node) and node.args[0] in views:
            views[node] = views[node.args[0]]
    return frozenset(node for node, memory in views.items() if memory in written)


def _reads(graph: fx.Graph, overwritten: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """Yield what is made of overwritten memory, and has memory of its own."""
    for node in graph.nodes:
        if node.op != "call_function" or node in overwritten or node.target is torch.ops.aten.copy_.default:
            continue
        reads = any(argument in overwritten for argument in node.all_input_nodes)
        if reads and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            yield node


def _is_view(node: fx.Node) -> bool:
    """Whether the node is a view of its first argument, or one of several such views."""
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def _lie_alike(node: fx.Node, source: fx.Node) -> bool:
    """Whether one could stand for the other."""
    one, other = node.meta.get("val"), source.meta.get("val")
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return (one.dtype, one.device, one.shape, one.stride()) == (other.dtype, other.device, other.shape, other.stride())
