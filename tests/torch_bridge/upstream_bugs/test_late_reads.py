"""Reads of an input before a write: what is saved for their sake; that gradients are right is in `end_to_end/`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from apollo_compile.torch_bridge.upstream_bugs.late_reads import keep_reads
from tests.end_to_end.test_values import USES
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

aten = torch.ops.aten


def _kept(function: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    """Trace `function`, whose `aten.clone` Inductor may drop, and keep its reads."""
    graph_module = make_fx(function)(torch.randn(4, 4), torch.randn(4, 4))
    keep_reads(graph_module.graph)
    graph_module.recompile()
    return graph_module


def _saved(graph_module: fx.GraphModule) -> list[object]:
    saved = (node for node in graph_module.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE)
    return [node.target for node in saved]


def test_a_graph_that_writes_to_no_input_is_not_changed() -> None:
    """Nor is anything saved for its sake."""
    made = _kept(lambda x, y: x.clone() * y.sin())
    targets = [node.target for node in made.graph.nodes if node.op == "call_function"]
    assert targets == [aten.clone.default, aten.sin.default, aten.mul.Tensor]
    assert _saved(made) == []


@pytest.mark.parametrize(
    ("read", "saved"),
    [
        (lambda x, y: (x.cos() * y.view(-1).view(4, 4).sin()).exp(), aten.sin.default),
        (lambda x, y: y.t().clone(memory_format=torch.contiguous_format), aten.clone.default),
    ],
    ids=["not views, nor what is made of the result", "a copy that lies otherwise"],
)
def test_only_what_is_made_of_the_written_input_is_saved(
    read: Callable[[Tensor, Tensor], Tensor], saved: object
) -> None:
    """Views read nothing, results may be computed again, and a copy that lies otherwise is no copy to drop."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = read(x, y)
        aten.copy_(y, x)
        return result

    assert _saved(_kept(use)) == [saved]


@pytest.mark.parametrize("function", USES[:2])
def test_torch_reads_an_input_after_the_write(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Where its pass drops a copy, and where its partitioner computes again what was made of the input."""
    x, kept = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    (expected,) = torch.autograd.grad(function(x, kept.clone()).sum(), x)
    (actual,) = torch.autograd.grad(torch.compile(function, backend="inductor")(x, kept).sum(), x)
    assert_as_listed("late_reads.py", is_there=not torch.allclose(actual, expected))
