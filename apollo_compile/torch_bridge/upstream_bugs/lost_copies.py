"""Copies that Inductor drops though somebody can tell them from what they copy.

    keep_copies(graph)              in place, on a graph after AOTAutograd and before Inductor's passes
    copied_by(node)                 what Inductor takes for the same as a node
    keep_copy(graph, node, source)  a copy that no pass drops
    lower_clones()                  let Inductor compile such a copy

`return y.clone(), y.detach().clone()` makes two tensors, the first with a gradient, and whoever gets one may write to
it. Inductor's pass against operators without effect looks out for a copy of what is returned already, but it drops both
copies of what is not, and the caller has one tensor twice, without a gradient. A single copy that it drops is the very
tensor that is saved for the backward, which then complains about a write that eager PyTorch allows. So a copy that is
returned copies from a `prims.clone`, which no pass drops, unless nothing else reads what it copies.
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
            keep_copy(graph, memory, sources[memory])


def keep_copy(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """Let `node` copy from a copy of `source` that no pass drops, and return that copy."""
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.prims.clone.default, (source,))
    copy.meta = {**node.meta, "val": node.meta["val"]}
    node.replace_input_with(source, copy)
    return copy


def copied_by(node: fx.Node) -> fx.Node | None:
    """Return what Inductor takes for the same as `node`; None where it takes nothing for it."""
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
    """Let Inductor compile `prims.clone`, which it does not know, as it does `aten.clone`."""
    register_lowering(torch.ops.prims.clone, type_promotion_kind=None)(clone)
