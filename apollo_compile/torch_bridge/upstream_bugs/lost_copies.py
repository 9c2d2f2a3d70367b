"""Copies that Inductor drops although the caller can distinguish them from their sources.

    keep_copies(graph)              in place, on a graph after AOTAutograd and before Inductor's passes
    copied_by(node)                 source of a node that Inductor considers a no-op
    keep_copy(graph, node, source)  insert a copy that no pass drops
    lower_clones()                  let Inductor compile such a copy

`return y.clone(), y.detach().clone()` makes two tensors, the first with a gradient, and the caller may write to either.
Inductor's pass that removes no-op operators keeps a copy of a value that is an output itself, but it drops both copies
of a value that is not, and the caller gets one tensor twice, without a gradient. If a single copy is dropped, the
output is the tensor that is saved for the backward, which then refuses a write that eager PyTorch allows. So a copy
that is an output copies from a `prims.clone`, which no pass drops, unless nothing else reads its source.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict

import torch
from torch import fx
from torch._inductor.fx_passes.post_grad import noop_registry, same_meta
from torch._inductor.fx_utils import get_fake_args_kwargs
from torch._inductor.lowering import clone, register_lowering

from apollo_compile.operators.writes import is_view


def keep_copies(graph: fx.Graph) -> None:
    """Make every output that is a copy a tensor of its own.

    Arguments:
        graph: forward and backward together, or an inference graph.
    """
    memories: dict[fx.Node, fx.Node] = {}
    """By node, the node that allocated the memory of its value."""
    sources: dict[fx.Node, fx.Node] = {}
    """By copy, the node that it copies."""
    origins: dict[fx.Node, fx.Node] = {}
    """By memory, the memory with the same value that is not a copy."""
    read: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    """By origin, the memories with its value that other nodes than copies read."""
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
            keep_copy(graph, memory, sources[memory])


def keep_copy(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """Let `node` copy from a copy of `source` that no pass drops, and return that copy."""
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.prims.clone.default, (source,))
    copy.meta = {**node.meta, "val": node.meta["val"]}
    node.replace_input_with(source, copy)
    return copy


def copied_by(node: fx.Node) -> fx.Node | None:
    """Return the node that Inductor would use in place of `node`; None if it does not consider `node` a no-op."""
    is_noop, source = noop_registry.get(node.target, (None, None))
    if callable(source):
        (takes,) = inspect.signature(source).parameters  # the node from torch 2.15 on, before that its arguments
        found = source(node if takes == "node" else node.args)
    else:
        found = None if source is None else node.args[source]
    if not (isinstance(found, fx.Node) and same_meta(node, found)):
        return None
    is_known, args, kwargs = get_fake_args_kwargs(node)
    return found if is_known and is_noop(*args, **kwargs) else None


@functools.cache
def lower_clones() -> None:
    """Register a lowering of `prims.clone`, which Inductor lacks: that of `aten.clone`."""
    register_lowering(torch.ops.prims.clone, type_promotion_kind=None)(clone)
