"""Reads of an input before a write stay apart from it, and so do copies that are returned; other graphs stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, fx  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy  # noqa: E402

from apollo_compile.torch_bridge.upstream_bugs.overwrites import keep_copies, keep_reads  # noqa: E402

aten, prims = torch.ops.aten, torch.ops.prims


def _kept(function: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    """Trace `function`, in which `aten.clone` may be dropped, and keep its reads."""
    graph_module = make_fx(function)(torch.randn(4, 4), torch.randn(4, 4))
    keep_reads(graph_module.graph, _copied_by)
    graph_module.recompile()
    return graph_module


def _copied_by(node: fx.Node) -> fx.Node | None:
    source = node.args[0] if node.target is aten.clone.default else None
    is_same = isinstance(source, fx.Node) and source.meta["val"].stride() == node.meta["val"].stride()
    return source if is_same else None


def _num_kept(function: Callable[[Tensor, Tensor], Any]) -> int:
    """Trace `function`, in which `aten.clone` may be dropped, and return how many copies are kept."""
    graph_module = make_fx(function)(torch.randn(4, 4), torch.randn(4, 4))
    keep_copies(graph_module.graph, _copied_by)
    graph_module.graph.lint()
    return _targets(graph_module).count(prims.clone.default)


def _targets(graph_module: fx.GraphModule) -> list[object]:
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def _saved(graph_module: fx.GraphModule) -> list[object]:
    saved = (node for node in graph_module.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE)
    return [node.target for node in saved]


def test_a_graph_that_writes_to_no_input_is_not_changed() -> None:
    """Nor is anything saved for its sake."""
    made = _kept(lambda x, y: x.clone() * y.sin())
    assert _targets(made) == [aten.clone.default, aten.sin.default, aten.mul.Tensor]
    assert _saved(made) == []


def test_only_what_is_made_of_the_written_input_is_saved() -> None:
    """Views of it are not: they read nothing. What is made of the result may be computed again."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = (x.cos() * y.view(-1).view(4, 4).sin()).exp()
        aten.copy_(y, x)
        return result

    assert _saved(_kept(use)) == [aten.sin.default]


def test_a_copy_of_the_written_input_gets_a_copy_that_stays() -> None:
    """Also of a view of it, and of no other input; the numbers stay what they were."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = x.clone() * y.clone() * y.t().clone()
        aten.copy_(y, x)
        return result

    made = _kept(use)
    assert _targets(made).count(prims.clone.default) == 2
    assert _saved(made) == [prims.clone.default] * 2
    inputs = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(made(*(value.clone() for value in inputs)), use(*inputs))


def test_a_copy_that_lies_otherwise_is_no_copy_to_drop() -> None:
    """It is saved, and copied once only."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = y.t().clone(memory_format=torch.contiguous_format)
        aten.copy_(y, x)
        return result

    assert _saved(_kept(use)) == [aten.clone.default]


def _copy_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return z.clone(), z.clone()


def _copy_a_copy(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    left = (x @ y).clone()
    return left, left.clone()


def _copy_what_others_read(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return z.clone(), z.sin()


def _view_copies(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return z.view(-1).clone()[2:], z.t().clone()[0]


@pytest.mark.parametrize(
    ("function", "kept"), [(_copy_twice, 2), (_copy_a_copy, 2), (_copy_what_others_read, 1), (_view_copies, 2)]
)
def test_a_returned_copy_stays_where_something_else_reads_what_it_copies(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], kept: int
) -> None:
    """Another copy, a copy of the copy, another operator; a view of a copy is in its memory."""
    assert _num_kept(function) == kept


def _copy_once(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).clone().clone()


def _copy_within(x: Tensor, y: Tensor) -> Tensor:
    z = x @ y
    return z.clone() + z.clone()


def _copy_to_other_strides(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x @ y).t()
    return z.clone(memory_format=torch.contiguous_format), z.sin()


@pytest.mark.parametrize("function", [_copy_once, _copy_within, _copy_to_other_strides])
def test_no_copy_is_made_that_nobody_can_tell_from_its_source(function: Callable[[Tensor, Tensor], Any]) -> None:
    """The only reader of a value may have the value itself; inside a graph nobody writes."""
    assert _num_kept(function) == 0
