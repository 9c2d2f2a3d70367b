"""Matmuls that oneDNN can compute are found, and those that are to be replaced have the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.onednn import find_matmuls, replace_with_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

LINEAR = "apollo_compile.linear.default"


def trace(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    """Return the graph of a function."""
    return make_fx(function, tracing_mode=mode)(*inputs)


def targets(graph: fx.Graph) -> list[str]:
    """Return the names of the operators that multiply."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if name == LINEAR or "mm" in name]


def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, up: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return what a layer computes forward and backward."""
    return torch.addmm(bias, x, weight.t()), torch.mm(up, weight), torch.mm(up.t(), x)


def layer() -> tuple[torch.Tensor, ...]:
    """Return inputs of `step`."""
    torch.manual_seed(0)
    return torch.randn(20, 12), torch.randn(16, 12), torch.randn(16), torch.randn(20, 16)


def test_all_three_products_of_a_layer_can_go_and_have_the_same_numbers() -> None:
    """They are told as they lie in memory."""
    inputs = layer()
    graph_module = trace(step, *inputs)
    found = find_matmuls(graph_module.graph)
    assert replace_with_onednn(graph_module.graph, lambda product: product in found) == 3
    assert [product.name for product in found] == ["20x12 12x16T+bias", "20x16 16x12", "16x20T 20x12"]
    assert [product.flops for product in found] == [2 * 20 * 12 * 16] * 3
    assert targets(graph_module.graph) == [LINEAR] * 3
    graph_module.recompile()
    torch.testing.assert_close(graph_module(*inputs), step(*inputs))


def test_only_what_is_faster_goes() -> None:
    """The other products stay as they were."""
    graph_module = trace(step, *layer())
    assert replace_with_onednn(graph_module.graph, lambda product: product.has_bias) == 1
    assert targets(graph_module.graph) == [LINEAR, "aten.mm.default", "aten.mm.default"]


@pytest.mark.parametrize(
    ("function", "inputs", "mode"),
    [
        pytest.param(torch.mm, [torch.ones(4, 6).double(), torch.ones(6, 8).double()], "fake", id="float64"),
        pytest.param(torch.mm, [torch.ones(4, 6).bfloat16(), torch.ones(6, 8).bfloat16()], "fake", id="bfloat16"),
        pytest.param(torch.mm, [torch.ones(4, 6), torch.ones(6, 8)], "symbolic", id="dynamic sizes"),
        pytest.param(lambda x, y: x[:, :6] @ y, [torch.ones(4, 9), torch.ones(6, 8)], "fake", id="part on the left"),
        pytest.param(lambda x, y: x @ y[:, :8], [torch.ones(4, 6), torch.ones(6, 9)], "fake", id="part on the right"),
        pytest.param(torch.bmm, [torch.ones(2, 4, 6), torch.ones(2, 6, 8)], "fake", id="batched"),
        pytest.param(torch.addmm, [torch.ones(4, 8), torch.ones(4, 6), torch.ones(6, 8)], "fake", id="matrix added"),
        pytest.param(torch.addmm, [torch.ones(1), torch.ones(4, 6), torch.ones(6, 8)], "fake", id="number added"),
        pytest.param(
            lambda b, x, y: torch.addmm(b, x, y, beta=2),
            [torch.ones(8), torch.ones(4, 6), torch.ones(6, 8)],
            "fake",
            id="scaled",
        ),
    ],
)
def test_other_products_stay(function: Callable[..., Any], inputs: list[torch.Tensor], mode: str) -> None:
    """They are not even asked for."""
    graph = trace(function, *inputs, mode=mode).graph
    before = targets(graph)
    assert before and not find_matmuls(graph)
    assert replace_with_onednn(graph, lambda product: pytest.fail(f"asked for {product}")) == 0
    assert targets(graph) == before
