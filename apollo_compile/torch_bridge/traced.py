"""A graph as AOTAutograd hands it to the session: tensors only, with what its caller promises.

Everything that the session and the device need to know of a graph besides its nodes is asked here, once, before it is
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from apollo_compile.target.target import Contract
from apollo_compile.torch_bridge.aot_graph import user_outputs, written_inputs
from apollo_compile.torch_bridge.boundary import Boundary, extract_boundary
from apollo_compile.torch_bridge.cuda_private import find_uncapturable
from apollo_compile.torch_bridge.dynamic_sizes import has_sizes
from apollo_compile.torch_bridge.layouts import adopt_layouts
from apollo_compile.torch_bridge.tensor_lists import with_tensors_apart


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedGraph:
    """A graph after AOTAutograd that takes and returns tensors only."""

    graph_module: fx.GraphModule
    """What is cut into segments."""
    whole: fx.GraphModule
    """The same as AOTAutograd made it: what Inductor compiles whole."""
    contract: Contract
    boundary: Boundary | None
    """Inputs and outputs of the original graph that are not tensors; None if there are none."""
    kwargs: Mapping[str, Any]
    """Arguments of Inductor's inner compiler."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Values of the symbols in its shapes when it was traced, by name; empty if all shapes are static."""
        return {} if self.boundary is None else self.boundary.sizes

    @property
    def sized(self) -> tuple[int, ...]:
        """Positions of the input tensors whose sizes change from call to call."""
        values = (node.meta["val"] for node in self.whole.graph.find_nodes(op="placeholder"))
        return tuple(place for place, each in enumerate(values) if isinstance(each, torch.Tensor) and has_sizes(each))


def take_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedGraph:
    """Return the graph with its boundary and its contract, traced for the strides of these inputs.

    Arguments:
        graph_module: changed in place if its inputs have other strides than traced.
        example_inputs: its inputs, fake tensors among them.
        kwargs: those of Inductor's inner compiler.

    Raises:
        UnsupportedGraphError: the graph returns a number that cannot be computed from its inputs.
    """
    aside = extract_boundary(graph_module, example_inputs, kwargs)
    piece, inputs, own, boundary = (graph_module, example_inputs, kwargs, None) if aside is None else aside
    adopt_layouts(piece, inputs)
    contract = Contract(
        static_inputs=frozenset(own.get("static_input_idxs") or ()),
        written_inputs=written_inputs(piece),
        user_outputs=user_outputs(piece),
        unsafe=find_uncapturable(piece),
    )
    apart = with_tensors_apart(piece)
    return TracedGraph(graph_module=apart, whole=piece, contract=contract, boundary=boundary, kwargs=own)
