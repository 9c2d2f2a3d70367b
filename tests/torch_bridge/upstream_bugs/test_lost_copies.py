"""Copies that are returned stay tensors of their own where somebody can tell; other graphs stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.upstream_bugs.lost_copies import keep_copies
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed


def _num_kept(function: Callable[[Tensor, Tensor], Any]) -> int:
    """Trace `function`, whose `aten.clone` Inductor may drop, and return how many copies are kept."""
    graph_module = make_fx(function)(torch.randn(4, 4), torch.randn(4, 4))
    keep_copies(graph_module.graph)
    graph_module.graph.lint()
    return len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.prims.clone.default))


def _copy_beside_a_reader(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x @ y
    return z.clone(), z.sin()


def _copy_once(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).clone().clone()


def _copy_within(x: Tensor, y: Tensor) -> Tensor:
    z = x @ y
    return z.clone() + z.clone()


def _copy_to_other_strides(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x @ y).t()
    return z.clone(memory_format=torch.contiguous_format), z.sin()


@pytest.mark.parametrize("function", [_copy_beside_a_reader, _copy_once, _copy_within, _copy_to_other_strides])
def test_no_copy_is_made_that_nobody_can_tell_from_its_source(function: Callable[[Tensor, Tensor], Any]) -> None:
    """The only reader of a value may have the value itself; inside a graph nobody writes.

    Two copies, copies of copies and views of them: `end_to_end/test_values.py`.
    """
    assert _num_kept(function) == (function is _copy_beside_a_reader)


def test_torch_returns_one_tensor_for_two_copies() -> None:
    """And without a gradient, which the first one has."""

    def copy(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.clone(), y.detach().clone()

    first, second = torch.compile(copy, backend="inductor")(torch.ones(4, requires_grad=True))
    assert_as_listed("lost_copies.py", is_there=first is second or not first.requires_grad)
