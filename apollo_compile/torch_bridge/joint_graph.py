"""Forward and backward after AOTAutograd as one graph: `join_graphs`.

Compiled as one, nothing has to be written to memory between them only because a backward reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.aot_graph import outputs_of, user_outputs


def join_graphs(forward: fx.GraphModule, backward: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that runs a forward and its backward.

    It takes the inputs of the forward, then those of the backward that the forward does not return: gradients of its
    outputs. It returns the outputs of the forward that the user sees, then all of the backward.

    Raises:
        UnsupportedGraphError: one of them has graphs inside, which other nodes refer to by name.
    """
    if any(node.op == "get_attr" for each in (forward, backward) for node in each.graph.nodes):
        raise UnsupportedGraphError("a graph inside of it belongs to the forward or to the backward")
    graph = fx.Graph()
    first = _copy_nodes(forward, graph, {})
    made = {node.name: first[node] for node in outputs_of(forward) if isinstance(node, fx.Node)}
    second = _copy_nodes(backward, graph, made)
    returned = [_in_copy(outputs_of(forward)[place], first) for place in sorted(user_outputs(forward))]
    graph.output((*returned, *(_in_copy(value, second) for value in outputs_of(backward))))
    return _LazyGraphModule(forward, graph)


def _copy_nodes(piece: fx.GraphModule, graph: fx.Graph, given: Mapping[str, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copy the nodes of a piece to the end of a graph, but for inputs that are `given` by name."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            copies[node] = given[node.name] if node.name in given else _add_input(graph, node)
        elif node.op != "output":
            copies[node] = graph.node_copy(node, lambda original: copies[original])
    return copies


def _add_input(graph: fx.Graph, original: fx.Node) -> fx.Node:
    """Add an input behind those that there are."""
    inputs = list(graph.find_nodes(op="placeholder"))
    with graph.inserting_after(inputs[-1]) if inputs else contextlib.nullcontext():
        return graph.node_copy(original)


def _in_copy(value: object, copies: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    return copies[value] if isinstance(value, fx.Node) else None
