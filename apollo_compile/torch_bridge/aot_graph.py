"""Graphs after AOTAutograd: a copy, and questions about outputs, writes and custom operators.

Such a graph is functional except for `copy_` into its inputs at its end, and for resizes of storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from apollo_compile.operators.effects import TORCH_NAMESPACES
from apollo_compile.operators.writes import written_by
from apollo_compile.torch_bridge.dynamic_sizes import has_sizes
from apollo_compile.torch_bridge.onednn import is_linear

FEWEST_UNCAST = 2**16
"""Least number of elements of a gradient that is returned before its cast."""

_CAST = torch.ops.prims.convert_element_type.default


def clone_graph(piece: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the nodes; Inductor changes the graph that it compiles."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.graph.nodes:
        copies[node] = graph.node_copy(node, lambda original: copies[original])
    return _LazyGraphModule(piece, graph)  # generates its code on demand only: that stays in `linecache` for ever


def outputs_of(graph_module: fx.GraphModule) -> Sequence[Any]:
    """Return the outputs of the graph: nodes and constants."""
    return graph_module.graph.output_node().args[0]  # type: ignore[return-value]


def return_uncast_gradients(backward: fx.GraphModule) -> None:
    """Return gradients in the dtype in which they are computed where a cast to their parameter's comes last.

    Who reads them casts, as autograd does. Small ones stay: compilers fuse their casts.
    """
    for value in [value for value in outputs_of(backward) if isinstance(value, fx.Node) and value.target is _CAST]:
        (made,) = value.all_input_nodes
        before, after = made.meta["val"], value.meta["val"]
        is_wider = before.is_floating_point() and after.is_floating_point() and before.itemsize < after.itemsize
        is_large = before.is_contiguous() and not has_sizes(after) and after.numel() >= FEWEST_UNCAST
        if is_wider and is_large and len(value.users) == 1:
            value.replace_all_uses_with(made)
            backward.graph.erase_node(value)
    backward.recompile()


def user_outputs(graph_module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of the outputs that outlive the next run; all positions if the graph does not say."""
    visible = graph_module.graph.output_node().meta.get("user_visible_output_idxs")
    return frozenset(range(len(outputs_of(graph_module))) if visible is None else visible)


def written_inputs(graph_module: fx.GraphModule) -> frozenset[int] | None:
    """Return the positions of the inputs that the graph writes to; None where it also writes to something else.

    After AOTAutograd a graph normally writes to its inputs only, at its end.
    """
    placeholders = {node: index for index, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    written = {value for node in graph_module.graph.nodes for value in written_by(node)}
    return frozenset(map(placeholders.__getitem__, written)) if written <= placeholders.keys() else None


def has_custom_operator(graph_module: fx.GraphModule) -> bool:
    """Whether an operator of the graph or of an inner graph may be written in Python.

    Only the Python wrapper passes on the exceptions of such an operator unchanged, and no cache key covers its code.
    """
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule))
    return any(_is_custom(node.target) for graph in graphs for node in graph.nodes)


def _is_custom(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]
    is_foreign = isinstance(target, torch._ops.OpOverload) and target.namespace not in TORCH_NAMESPACES
    return is_foreign and not is_linear(target)
