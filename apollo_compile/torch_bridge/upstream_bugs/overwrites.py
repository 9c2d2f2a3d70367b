"""Memory of their own for values that somebody may write to: inputs that the graph writes to, and copies it returns.

    keep_reads(graph, copied_by)     in place, on a graph after AOTAutograd and before Inductor's passes
    keep_copies(graph, copied_by)    the same

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

Note [Copies that are returned]
    `return y.clone(), y.detach().clone()` makes two tensors, the first with a gradient, and whoever gets one may write
    to it. The same pass against operators without effect looks out for a copy of what is returned already, but it drops
    both copies of what is not, and the caller has one tensor twice, without a gradient. A single copy that it drops is
    the very tensor that is saved for the backward, which then complains about a write that eager PyTorch allows. So a
    copy that is returned gets the `prims.clone` too, unless nothing else reads what it copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from apollo_compile.operators.writes import frees_storage, is_view, written_by


def keep_reads(graph: fx.Graph, copied_by: Callable[[fx.Node], fx.Node | None]) -> None:
    """Make every read of memory that the graph writes to happen where it is, in the forward.

    Arguments:
        graph: forward and backward together, or an inference graph.
        copied_by: returns the argument that a node is nothing but a copy of; None for other nodes.
    """
    overwritten = _overwritten(graph)
    for node in list(_reads(graph, overwritten)):
        source = copied_by(node)
        kept = _keep_copy(graph, node, source) if source is not None and source in overwritten else node
        kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def keep_copies(graph: fx.Graph, copied_by: Callable[[fx.Node], fx.Node | None]) -> None:
    """Make every output that is a copy a tensor of its own: Note [Copies that are returned].

    Arguments:
        graph: forward and backward together, or an inference graph.
        copied_by: as for `keep_reads`.
    """
    memories: dict[fx.Node, fx.Node] = {}
    """What made the memory that a node's value is in."""
    sources: dict[fx.Node, fx.Node] = {}
    """By copy, what it is a copy of."""
    origins: dict[fx.Node, fx.Node] = {}
    """By memory, the one that has the same value in it and is no copy."""
    read: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    """By origin, the memories with its value that something reads; copying it does not count."""
    for node in graph.nodes:
        source = node.args[0] if is_view(node) else None
        copied = copied_by(node) if source is None else None
        memories[node] = node if source is None else memories[source]
        if copied is not None:
            sources[node] = copied
        if source is None:
            origins[node] = node if copied is None else origins[memories[copied]]
        for argument in node.all_input_nodes if source is None and copied is None else ():
            read[origins[memories[argument]]].add(memories[argument])
    for memory in dict.fromkeys(memories[value] for value in graph.output_node().all_input_nodes):
        if memory in sources and len(read[origins[memory]]) > 1:
            _keep_copy(graph, memory, sources[memory])


def _keep_copy(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """Let `node` copy from a copy of `source` that no pass drops, and return that."""
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.prims.clone.default, (source,))
    copy.meta = {**node.meta, "val": node.meta["val"]}
    node.replace_input_with(source, copy)
    return copy


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
    """Return a number that inputs have in common which shared memory in the trace; None for what is no tensor."""
    value = node.meta["val"]
    has_storage = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if has_storage else None


def _reads(graph: fx.Graph, overwritten: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """Yield what is made of overwritten memory, and has memory of its own."""
    for node in graph.nodes:
        if node.op != "call_function" or node in overwritten or written_by(node):
            continue
        reads = any(argument in overwritten for argument in node.all_input_nodes)
        if reads and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            yield node
