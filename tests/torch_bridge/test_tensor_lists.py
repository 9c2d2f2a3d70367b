"""Operators on lists of tensors, taken apart: the numbers are those of the operators themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.tensor_lists import with_tensors_apart

aten = torch.ops.aten

Operator = Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor], Sequence[torch.Tensor]]

OPERATORS: dict[str, Operator] = {
    "abs": lambda a, b, c, n: aten._foreach_abs(a),
    "neg": lambda a, b, c, n: aten._foreach_neg(a),
    "reciprocal": lambda a, b, c, n: aten._foreach_reciprocal(b),
    "rsqrt": lambda a, b, c, n: aten._foreach_rsqrt(b),
    "sign": lambda a, b, c, n: aten._foreach_sign(a),
    "sqrt": lambda a, b, c, n: aten._foreach_sqrt(b),
    "add a number": lambda a, b, c, n: aten._foreach_add.Scalar(a, 0.25),
    "add numbers": lambda a, b, c, n: aten._foreach_add.ScalarList(a, [0.25, 2.0, -1.0]),
    "add": lambda a, b, c, n: aten._foreach_add.List(a, b, alpha=0.5),
    "add one": lambda a, b, c, n: aten._foreach_add.Tensor(a, n, alpha=0.5),
    "sub": lambda a, b, c, n: aten._foreach_sub.List(a, b, alpha=2),
    "sub a number": lambda a, b, c, n: aten._foreach_sub.Scalar(a, 0.25),
    "mul": lambda a, b, c, n: aten._foreach_mul.List(a, b),
    "mul one": lambda a, b, c, n: aten._foreach_mul.Tensor(a, n),
    "mul numbers": lambda a, b, c, n: aten._foreach_mul.ScalarList(a, [0.25, 2.0, -1.0]),
    "div": lambda a, b, c, n: aten._foreach_div.List(a, b),
    "div a number": lambda a, b, c, n: aten._foreach_div.Scalar(a, 3.0),
    "maximum": lambda a, b, c, n: aten._foreach_maximum.List(a, b),
    "maximum with a number": lambda a, b, c, n: aten._foreach_maximum.Scalar(a, 0.1),
    "minimum": lambda a, b, c, n: aten._foreach_minimum.List(a, b),
    "clamp_min": lambda a, b, c, n: aten._foreach_clamp_min.Scalar(a, 0.1),
    "clamp_max": lambda a, b, c, n: aten._foreach_clamp_max.List(a, b),
    "pow": lambda a, b, c, n: aten._foreach_pow.List(b, a),
    "pow a number": lambda a, b, c, n: aten._foreach_pow.Scalar(b, 3),
    "a number's pow": lambda a, b, c, n: aten._foreach_pow.ScalarAndTensor(0.9, a),
    "addcmul": lambda a, b, c, n: aten._foreach_addcmul.Scalar(a, b, c, 0.5),
    "addcmul as it is": lambda a, b, c, n: aten._foreach_addcmul.Scalar(a, b, c),
    "addcdiv": lambda a, b, c, n: aten._foreach_addcdiv.Scalar(a, c, b, -0.5),
    "addcdiv numbers": lambda a, b, c, n: aten._foreach_addcdiv.ScalarList(a, c, b, [0.25, 2.0, -1.0]),
}


def inputs() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return three lists of tensors of three shapes, those of the second above zero, and a number."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (2, 4), ())] for _ in range(3)
    )
    return a, [each.abs() + 0.5 for each in b], c, torch.tensor(1.5, dtype=torch.float64)


def traced(operator: Operator) -> fx.GraphModule:
    """Return the graph of an operator, with the values that AOTAutograd leaves."""
    return make_fx(operator, tracing_mode="fake")(*inputs())


def lists_in(graph_module: fx.GraphModule) -> list[str]:
    """Return the operators on lists in a graph."""
    return [str(node.target) for node in graph_module.graph.nodes if "_foreach_" in str(node.target)]


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_those_of_the_operator(name: str) -> None:
    """And so are the values that the graph tells of its nodes; the given graph stays."""
    graph_module = traced(OPERATORS[name])
    apart = with_tensors_apart(graph_module)
    assert len(lists_in(graph_module)) == 1 and not lists_in(apart)
    expected = OPERATORS[name](*inputs())
    a, b, c, number = inputs()
    found = fx.Interpreter(apart).run(*a, *b, *c, number, enable_io_processing=False)
    torch.testing.assert_close(list(found), list(expected))
    values = [node.meta["val"] for node in apart.graph.output_node().all_input_nodes]
    assert [(each.shape, each.dtype) for each in values] == [(each.shape, each.dtype) for each in expected]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_less_precision_is_as_in_eager(name: str, dtype: torch.dtype) -> None:
    """To the bit: what would be rounded more often than there stays on lists."""
    a, b, c = ([each.to(dtype) for each in part] for part in inputs()[:3])
    arguments = (a, b, c, torch.tensor(1.5, dtype=dtype))
    apart = with_tensors_apart(make_fx(OPERATORS[name], tracing_mode="fake")(*arguments))
    assert bool(lists_in(apart)) == name.startswith("addc")
    found = fx.Interpreter(apart).run(*a, *b, *c, arguments[3], enable_io_processing=False)
    torch.testing.assert_close(list(found), list(OPERATORS[name](*arguments)), rtol=0, atol=0)


def test_sizes_may_be_numbers() -> None:
    """Where a size is dynamic, a number depends on it."""

    def operator(a: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        length = a[0].shape[0]
        return aten._foreach_pow.Scalar(aten._foreach_clamp_min.Scalar(aten._foreach_add.Scalar(a, length), length), 2)

    a = [torch.randn(3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)]
    graph_module = make_fx(operator, tracing_mode="symbolic")(a)
    apart = with_tensors_apart(graph_module)
    assert len(lists_in(graph_module)) == 3 and not lists_in(apart)
    torch.testing.assert_close(list(fx.Interpreter(apart).run(*a, enable_io_processing=False)), list(operator(a)))


def test_a_graph_without_lists_is_returned_and_so_is_one_with_the_numbers_of_all_tensors_in_a_tensor() -> None:
    """There is one of them for each tensor of the list; nothing is copied."""
    graph_module = traced(lambda a, b, c, n: [a[0] + b[0]])
    assert with_tensors_apart(graph_module) is graph_module
    graph = fx.Graph()
    one, other, third, numbers = (graph.placeholder(name) for name in ("a", "b", "c", "numbers"))
    made = graph.call_function(aten._foreach_addcmul.Tensor, ([one], [other], [third], numbers))
    graph.output(graph.call_function(operator.getitem, (made, 0)))
    graph_module = fx.GraphModule({}, graph)
    assert with_tensors_apart(graph_module) is graph_module
