"""Strides of inputs and outputs of graphs, which may be expressions of dynamic sizes.

A body is compiled for the traced strides of its inputs, so the code that makes these inputs must produce them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.compile_fx import fake_tensor_prop
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.utils import set_tracing_context_output_strides
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.printers import PythonPrinter

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.aot_graph import outputs_of


def adopt_layouts(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Trace the values of a graph again if its inputs have other strides than when it was traced.

    Inductor may choose the strides of tensors that a forward saves; AOTAutograd passes them on as example inputs of the
    backward.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if any(
        _has_other_strides(node.meta.get("val"), real) for node, real in zip(placeholders, example_inputs, strict=True)
    ):
        view_to_reshape(graph_module)  # type: ignore[no-untyped-call]  # a view of the old strides may need a copy with the new ones
        with torch.no_grad():
            fake_tensor_prop(graph_module, list(example_inputs), True)


def _has_other_strides(traced: Any, real: Any) -> bool:
    are_tensors = isinstance(traced, torch.Tensor) and isinstance(real, torch.Tensor)
    return are_tensors and _exprs(traced.stride()) != _exprs(real.stride())


def _exprs(sizes: Sequence[Any]) -> list[Any]:
    """Return sizes as expressions, so that comparing them adds no guard."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]


def report_output_strides(graph_module: fx.GraphModule) -> None:
    """Fill the tracing context with the traced strides of the graph's outputs, which all bodies keep.

    As with Inductor, strides that depend on data are not reported.

    Inductor's own function does it: whether strides of dynamic sizes are reported as expressions or as numbers depends
    on the release of torch, and the wrong form would specialize the backward to these sizes.
    """
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in outputs_of(graph_module)]
    write = PythonPrinter().doprint
    strides = [
        tuple(map(write, _exprs(value.stride())))
        if isinstance(value, torch.Tensor) and not free_unbacked_symbols(value.stride())
        else None
        for value in values
    ]
    inputs = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    compiled: Any = SimpleNamespace(output_strides=strides)
    set_tracing_context_output_strides(inputs, compiled)


Layouts = list[tuple[tuple[Any, ...], tuple[Any, ...]] | None]
"""Shape and strides of outputs, which may contain symbolic sizes; None for an output that is not a tensor."""


def output_layouts(piece: fx.GraphModule) -> Layouts:
    """Return the traced layouts of the outputs of a piece; call it before Inductor changes the graph."""
    values = [node.meta["val"] if isinstance(node, fx.Node) else None for node in outputs_of(piece)]
    return [None if value is None else (tuple(value.shape), tuple(value.stride())) for value in values]


def check_layouts(name: str, function: Callable[..., Any], layouts: Layouts) -> None:
    """Raise UnsupportedGraphError if outputs have other strides than traced, for which their readers were compiled."""
    chosen = getattr(function, "output_strides", None) or [None] * len(layouts)
    for number, (layout, strides) in enumerate(zip(layouts, chosen, strict=True)):
        if layout is None or strides is None:
            continue
        shape, traced = layout
        known = [size if isinstance(size, int) else 2 for size in shape]  # comparing others would add guards
        if 0 in known:  # no element has a place
            continue
        if not all(_is_same(t, s) for s, t, size in zip(strides, traced, known, strict=True) if size > 1):
            raise UnsupportedGraphError(
                f"Inductor gave output {number} of {name} the strides {tuple(strides)} instead of {traced}"
            )


def _is_same(traced: int | torch.SymInt, chosen: Any) -> bool:
    """Whether a traced stride equals Inductor's, which is a number, an expression, or the text of one."""
    if isinstance(traced, torch.SymInt):
        if isinstance(chosen, str):
            chosen = traced.node.shape_env.deserialize_symexpr(chosen)
        expr = chosen.node.expr if isinstance(chosen, torch.SymInt) else chosen
        return bool(sympy.expand(traced.node.expr - expr) == 0)
    return str(chosen) == str(traced)
