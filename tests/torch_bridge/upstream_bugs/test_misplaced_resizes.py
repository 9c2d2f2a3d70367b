"""After AOTAutograd every resize is of an input, and an input without memory is not written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.upstream_bugs.misplaced_resizes import settle_resizes
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

aten = torch.ops.aten
resize = torch.ops.inductor.resize_storage_bytes_
SIZE = 64


def _settled(function: Callable[[Tensor, Tensor], Tensor]) -> fx.Graph:
    """Trace `function` of two tensors of 64 bytes, and settle its resizes."""
    graph_module = make_fx(function, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
    settle_resizes(graph_module.graph)
    graph_module.graph.lint()
    return graph_module.graph


def _story(graph: fx.Graph) -> list[str]:
    """Return what is resized, and what copied into, in order."""
    found = []
    for node in graph.nodes:
        if node.target is resize.default:
            found.append(f"{node.args[0].name} {node.args[1]}")
        elif node.target is aten.copy_.default:
            found.append(f"{node.args[0].name} = {node.args[1].name}")
    return found


def test_a_resize_of_an_input_stays() -> None:
    """Also through views of it."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = x @ y
        resize(y.t()[1:], 0)
        resize(x, 0)
        return result

    assert _story(_settled(use)) == ["y_1 0", "x_1 0"]


def test_an_input_that_was_filled_and_freed_is_freed_and_not_copied_into() -> None:
    """AOTAutograd frees the value instead, and copies it at the end."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        resize(x, SIZE)
        value = aten.copy(x, y)
        result = value.t() @ y
        resize(value.t(), 0)
        aten.copy_(x, value)
        return result

    graph = _settled(use)
    assert _story(graph) == ["x_1 64", "x_1 0"]
    targets = [node.target for node in graph.nodes]
    assert targets.index(aten.mm.default) < len(targets) - 1 - targets[::-1].index(resize.default)


def test_an_input_that_was_freed_and_filled_is_copied_into() -> None:
    """What it had before is nobody's any more."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        value = aten.copy(x, y)
        result = value @ y
        resize(value, 0)
        resize(value, SIZE)
        again = aten.copy(value, result)
        aten.copy_(x, again)
        return result

    assert _story(_settled(use)) == ["x_1 = copy_1"]


def test_what_the_graph_made_is_not_resized() -> None:
    """It goes by itself; of two outputs of an operator, only one is meant."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        largest, where = torch.max(x @ y, 0)
        resize(where, 0)
        made = x.exp()
        resize(made, 0)
        aten.copy_(y, largest.expand(4, 4).clone())
        return made.new_ones(4)

    assert _story(_settled(use)) == ["y_1 = clone"]


def test_torch_frees_the_value_instead_of_the_input() -> None:
    """It copies it into the input afterwards; to run such a graph would crash."""
    found: list[fx.Graph] = []

    def keep(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Tensor]]:
        found.append(graph_module.graph)
        return lambda *inputs: [torch.zeros(4, 4)]

    def fill_use_and_free(weight: Tensor, full: Tensor, x: Tensor) -> Tensor:
        weight.untyped_storage().resize_(SIZE)
        weight.copy_(full)
        result = x @ weight
        weight.untyped_storage().resize_(0)
        return result

    weight = torch.empty(4, 4)
    weight.untyped_storage().resize_(0)
    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    with torch.no_grad():
        torch.compile(fill_use_and_free, backend=backend)(weight, torch.ones(4, 4), torch.ones(4, 4))
    (graph,) = found
    resized = [node.args[0] for node in graph.find_nodes(op="call_function", target=resize.default)]
    assert resized
    assert_as_listed("misplaced_resizes.py", is_there=any(value.op != "placeholder" for value in resized))
