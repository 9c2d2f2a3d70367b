"""Nodes have the work of their operator's entry, in the symbols of the graph's shapes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.ir import KernelKind, Role, Work
from apollo_compile.ir.text import format_capture
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.work import evaluate, name_of, node_work, work_of
from apollo_compile.passes.capture import capture_graph
from tests.operators.test_effects import seen

aten = torch.ops.aten
_X = torch.rand(4, 6)


def test_formulas_keep_shape_symbols_until_they_get_hints() -> None:
    """One formula serves every batch size, and a missing hint is named."""
    graph = make_fx(torch.mm, tracing_mode="symbolic")(torch.rand(8, 5), torch.rand(5, 7)).graph
    (work,) = (work_of(node) for node in graph.nodes if node.target is aten.mm.default)
    left, right = (node.meta["val"] for node in graph.nodes if node.op == "placeholder")
    rows, inner, columns = (size.node.expr for size in (*left.shape, right.shape[1]))
    for batch in (1, 8, 100):
        measured = evaluate(work, {rows: batch, inner: 5, columns: 7})
        assert (measured.flops, measured.bytes_written) == (batch * 5 * 7 * 2, batch * 7 * 4)
    with pytest.raises(ValueError, match=f"no hint for {rows}"):
        evaluate(work, {inner: 5, columns: 7})


@pytest.mark.parametrize("dtype", ("float32", "float64", "bfloat16"))
def test_a_kernel_knows_what_its_operands_are(dtype: str) -> None:
    """Devices differ in speed by dtype and kind; the numbers are the node's."""
    left, right = (torch.ones(4, 4, dtype=getattr(torch, dtype)) for _ in range(2))
    work = evaluate(node_work(aten.mm.default, (left, right), {}, left @ right), {})
    (part,) = work.parts
    assert (part.kind, part.dtype, part.flops, part.count) == (KernelKind.MATMUL, dtype, work.flops, 1)
    assert part.bytes_moved == work.bytes_read + work.bytes_written
    assert part.bytes_from_outside == work.bytes_read


def test_views_and_constants_are_no_kernels() -> None:
    """They have no part in the time."""
    assert evaluate(node_work(aten.view.default, (_X, [24]), {}, _X.view(24)), {}).parts == ()
    assert evaluate(node_work(aten.full.default, ([4, 6], 0.0), {}, _X), {}).parts == ()


@torch.library.custom_op("apollo_tests::shifted", mutates_args=(), tags=(torch.Tag.pointwise,))
def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return more."""
    return x + 1


def test_what_has_no_entry_is_what_torch_says_of_it() -> None:
    """A user's pointwise operator; arithmetic on sizes is free, and anything else costs its bytes."""
    pointwise, unknown = (node_work(op._opoverload, (_X,), {}, _X.clone()) for op in (shifted, seen))
    assert (pointwise.kind, pointwise.flops) == (WorkKind.POINTWISE, 24)
    assert (unknown.kind, unknown.flops, unknown.bytes_read, unknown.bytes_written) == (WorkKind.UNKNOWN, 0, 96, 96)
    for function in (operator.mul, torch.sym_max):
        assert evaluate(node_work(function, (3, 4), {}, 12), {}) == Work()


def test_names_are_those_of_overloads_and_of_functions_and_find_the_same_entry() -> None:
    """Tables and dumps have the same, and products carry nothing else."""
    named = (aten.add.Tensor, operator.getitem, torch.ops.higher_order.cond, "x")
    assert [name_of(target) for target in named] == ["aten.add.Tensor", "getitem", "cond", "x"]
    args = (torch.rand(3, 5), torch.rand(5, 7))
    found = [node_work(target, args, {}, torch.rand(3, 7)) for target in ("aten.mm.default", aten.mm.default)]
    assert found[0] == found[1]


def test_an_operator_without_a_formula_is_counted_by_bytes_and_named() -> None:
    """In the capture and its text; a graph that has formulas for all names none."""

    def distances(left: Any, right: Any) -> tuple[Any, ...]:
        return (torch.ops.aten._cdist_forward(left, right, 2.0, None) + 1,)

    traced = make_fx(distances, tracing_mode="fake")(torch.rand(4, 6), torch.rand(5, 6))
    made = capture_graph(traced, name="distances", role=Role.INFERENCE)
    assert made.without_formula == ("aten._cdist_forward.default",)
    assert "counted by bytes alone: aten._cdist_forward.default" in format_capture(made)
    (work,) = (node.work for node in made.nodes if node.target in made.without_formula)
    assert (work.flops, work.bytes_read, work.bytes_written, work.kernels) == (0, 4 * (24 + 30), 4 * 20, 1)

    traced = make_fx(lambda left, right: (left + right,), tracing_mode="fake")(_X, _X)
    made = capture_graph(traced, name="sum", role=Role.INFERENCE)
    assert made.without_formula == ()
    assert "counted by bytes alone" not in format_capture(made)
