"""Writes to numbers arrive, whatever was compiled before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

from apollo_compile.torch_bridge.upstream_bugs.dropped_writes import keep_writes
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

HAS_DEFECT = TorchVersion(torch.__version__) < "2.14.1"


def _number() -> Tensor:
    return torch.tensor(0.5, dtype=torch.float64)


def _count(count: Tensor, x: Tensor) -> Tensor:
    count.add_(2)
    return x * count


def _scale(count: Tensor, x: Tensor) -> Tensor:
    return x * count


def _compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    with keep_writes(graph_module):
        return aot_eager(graph_module, example_inputs)


def test_torch_drops_a_write_to_a_number() -> None:
    """The product has the old number, too."""
    count = _number()
    torch.compile(_count, backend="aot_eager")(count, torch.ones(3, dtype=torch.float64))
    assert_as_listed("dropped_writes.py", is_there=count.item() == 0.5)


def _overwrite(count: Tensor, x: Tensor) -> Tensor:
    count.copy_(x.sum())
    return x + count


def _accumulate(count: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        count.lerp_(x.detach().mean(), 0.5)
        count.mul_(3)
    return x / count


def _write_only(count: Tensor, x: Tensor) -> Tensor:
    count.zero_()
    return x + 1


def _write_out(count: Tensor, x: Tensor) -> Tensor:
    torch.add(count, 1, out=count)
    return x * count


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("function", [_count, _overwrite, _accumulate, _write_only, _write_out])
def test_writes_arrive(function: Callable[[Tensor, Tensor], Tensor], *, is_trained: bool) -> None:
    """In forwards with and without a backward."""
    compiled = torch.compile(function, backend=_compile_graph)
    ours, theirs = _number(), _number()
    for _ in range(3):
        x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=is_trained and function is not _overwrite)
        torch.testing.assert_close(compiled(ours, x), function(theirs, x))
        assert ours == theirs


@pytest.mark.parametrize("is_ours", [False, True])
def test_no_symbol_of_another_function_drops_a_write(*, is_ours: bool) -> None:
    """Its input has the same name, and so has its symbol."""
    x = torch.ones(3, dtype=torch.float64)
    torch.compile(_scale, backend=_compile_graph if is_ours else "aot_eager")(_number(), x)
    count = _number()
    assert torch.equal(torch.compile(_count, backend=_compile_graph)(count, x), torch.full_like(x, 2.5))
    assert count.item() == 2.5
    assert TensorifyState.empty() or not HAS_DEFECT


def test_a_write_arrives_where_a_number_of_python_makes_dynamo_trace_again() -> None:
    """The number is in sizes, so a program is for one such number."""

    def stretch(count: Tensor, x: Tensor, factor: float) -> Tensor:
        count.add_(1)
        return torch.nn.functional.interpolate(x[None, None], scale_factor=factor).sum() * count

    compiled = torch.compile(stretch, backend=_compile_graph)
    ours, theirs = _number(), _number()
    x = torch.ones(3, dtype=torch.float64)
    for factor in (1.5, 2.5, 3.5):
        torch.testing.assert_close(compiled(ours, x, factor), stretch(theirs, x, factor))
        assert ours == theirs


@pytest.mark.skipif(not HAS_DEFECT, reason="torch is left alone")
def test_a_number_that_is_only_read_is_traced_once() -> None:
    """Trace it once, where torch alone traces it twice for nothing."""
    counter = CompileCounterWithBackend(_compile_graph)
    compiled = torch.compile(_scale, backend=counter)
    for _ in range(2):
        compiled(_number(), torch.ones(3, dtype=torch.float64))
    assert counter.frame_count == 1


def test_a_graph_without_dynamo_is_left_alone() -> None:
    """Nobody could trace it again."""
    graph_module = fx.symbolic_trace(_count)
    TensorifyState.specialize("zf1")
    with keep_writes(graph_module):
        assert TensorifyState.should_specialize("zf1")
