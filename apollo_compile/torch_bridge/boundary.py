"""Inputs and outputs of a graph that are not tensors: objects that only pass through, and sizes.

Buffers hold tensors only. So an object bypasses the graph, and a size passes through it as a 0-dimensional tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils._sympy.printers import PythonPrinter

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.aot_graph import clone_graph, outputs_of


@dataclass(frozen=True, slots=True)
class Boundary:
    """Inputs and outputs of a graph that are not tensors.

    Objects that are only returned, such as DTensor's device meshes, bypass the graph. Sizes, which are integers, pass
    through it as 0-dimensional tensors, because buffers hold tensors; sizes among the outputs are computed from those
    among the inputs.
    """

    objects: tuple[int, ...]
    """Positions of the inputs that are objects, ascending."""
    returned: tuple[tuple[int, int], ...]
    """Positions of outputs that are objects, and of the inputs that are returned there."""
    numbers: tuple[int, ...]
    """Positions of the inputs that are sizes."""
    symbols: tuple[tuple[str, int], ...]
    """Names of the symbols in the graph's shapes, and the positions of the inputs that give them."""
    traced: tuple[int, ...]
    """Values of `symbols` when the graph was traced."""
    computed: tuple[tuple[int, Callable[..., Any]], ...]
    """Positions of outputs that are numbers, and functions that compute them from the values of `symbols`, in order."""

    @property
    def sizes(self) -> dict[str, int]:
        """Values of the symbols when the graph was traced, by name."""
        return {name: size for (name, _), size in zip(self.symbols, self.traced, strict=True)}

    def take(self, inputs: list[Any]) -> dict[int, Any]:
        """Remove objects from the inputs of a call, replace sizes by tensors, and return both by position."""
        taken = {position: inputs[position] for position in (*self.objects, *self.numbers)}
        for position in self.numbers:
            inputs[position] = torch.tensor(inputs[position], dtype=torch.int64, device="cpu")
        for position in reversed(self.objects):
            del inputs[position]
        return taken

    def give(self, outputs: Sequence[Any], taken: Mapping[int, Any]) -> list[Any]:
        """Return the outputs with objects and sizes put back."""
        complete = list(outputs)
        for output, position in self.returned:
            complete[output] = taken[position]
        sizes = [taken[position] for _, position in self.symbols]
        for output, compute in self.computed:
            complete[output] = compute(*sizes)
        return complete


def extract_boundary(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[Any], dict[str, Any], Boundary] | None:
    """Return a graph of tensors only, its example inputs, its keyword arguments, and the boundary.

    None if the graph already takes tensors only. An object that an operator uses stays an input, so that capture
    refuses the graph.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    objects = {
        node: position
        for position, (node, value) in enumerate(zip(placeholders, values, strict=True))
        if isinstance(value, FakeScriptObject) and all(user.op == "output" for user in node.users)
    }
    numbers = tuple(position for position, value in enumerate(values) if isinstance(value, torch.SymInt))
    if not objects and not numbers:
        return None
    positions: dict[Any, int] = {}
    for position in numbers:
        if values[position].node.expr.is_Symbol and values[position].node.has_hint():
            positions.setdefault(values[position].node.expr, position)
    outputs = list(enumerate(outputs_of(graph_module)))
    sizes = [(place, number) for place, output in outputs if (number := _number_of(output)) is not None]
    piece = clone_graph(graph_module)
    copies = piece.graph.find_nodes(op="placeholder")
    output_node = piece.graph.output_node()
    returned = list(outputs_of(piece))
    for place, _ in sizes:
        returned[place] = None
    output_node.args = (tuple(returned),)
    for position in objects.values():
        copies[position].replace_all_uses_with(None)
        piece.graph.erase_node(copies[position])
    boundary = Boundary(
        objects=tuple(objects.values()),
        returned=tuple((place, objects[value]) for place, value in outputs if value in objects),
        numbers=numbers,
        symbols=tuple((str(symbol), position) for symbol, position in positions.items()),
        traced=tuple(values[position].node.hint for position in positions.values()),
        computed=tuple((place, _compute(size, positions, values)) for place, size in sizes),
    )
    kept = [position for position in range(len(placeholders)) if position not in boundary.objects]
    static = [kept.index(position) for position in kwargs.get("static_input_idxs") or () if position in kept]
    inputs = [example_inputs[position] for position in kept]
    return piece, inputs, {**kwargs, "static_input_idxs": static}, boundary


def _number_of(output: Any) -> Any:
    value = output.meta.get("val") if isinstance(output, fx.Node) else output
    return value if isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool) else None


def _compute(number: Any, positions: Mapping[Any, int], values: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of the symbols in `positions` that computes a symbolic number.

    Arguments:
        number: as it was traced.
        positions: of the symbols among the inputs.
        values: the inputs, as they were traced.

    Raises:
        UnsupportedGraphError: the number depends on something else, or on a function that has no form in Python.
    """
    if isinstance(number, int | float):  # it was found to be the same in all calls
        return lambda *_: number
    expr = number.node.expr
    unknown = expr.free_symbols - positions.keys()
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise UnsupportedGraphError(f"the graph returns the number {expr}, and none of its inputs says what {names} is")
    try:
        names_in_code = {"math": math, "torch": torch}
        compute = sympy.lambdify(list(positions), expr, modules=[names_in_code], printer=PythonPrinter, cse=False)
        is_right = compute(*(values[position].node.hint for position in positions.values())) == number.node.hint
    except Exception as error:
        raise UnsupportedGraphError(f"the graph returns {expr}, which Python cannot compute: {error}") from error
    if not is_right:
        raise UnsupportedGraphError(f"the graph returns the number {expr}, which Python computes otherwise than torch")
    return compute  # type: ignore[no-any-return]


def with_numbers(function: Callable[[list[Any]], Sequence[Any]], fakes: Sequence[Any]) -> Callable[..., Any]:
    """Return `function` taking 0-dimensional tensors for sizes, which are where `fakes` has symbolic integers."""
    numbers = [position for position, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
    if not numbers:
        return function

    def call(inputs: list[Any]) -> Sequence[Any]:
        for position in numbers:
            inputs[position] = int(inputs[position])
        return function(inputs)

    return call
