"""After AOTAutograd every resize is of an input; what becomes of inputs: `end_to_end/test_resized_storages.py`."""

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


def _settled(function: Callable[[Tensor, Tensor], Tensor]) -> fx.Graph:
    """Trace `function`, and settle its resizes."""
    graph = make_fx(function, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4)).graph
    settle_resizes(graph)
    graph.lint()
    return graph


def test_a_resize_of_an_input_stays() -> None:
    """Through views of it, too: it is of the input then."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        result = x @ y
        resize(y.t()[1:], 0)
        resize(x, 0)
        return result

    found = _settled(use).find_nodes(op="call_function", target=resize.default)
    assert [node.args[0].name for node in found] == ["y_1", "x_1"]


def test_what_the_graph_made_is_not_resized() -> None:
    """It goes by itself; of two outputs of an operator, only one is meant."""

    def use(x: Tensor, y: Tensor) -> Tensor:
        largest, where = torch.max(x @ y, 0)
        resize(where, 0)
        made = x.exp()
        resize(made, 0)
        aten.copy_(y, largest.expand(4, 4).clone())
        return made.new_ones(4)

    graph = _settled(use)
    assert not graph.find_nodes(op="call_function", target=resize.default)
    assert len(graph.find_nodes(op="call_function", target=aten.copy_.default)) == 1


def test_a_view_of_a_number_is_none() -> None:
    """The gradient of a product with a complex number has its conjugate, as an operator."""
    graph = fx.Graph()
    graph.output(graph.call_function(aten._conj.default, (1j,)))
    settle_resizes(graph)
    assert len(graph.nodes) == 2


def test_torch_frees_the_value_instead_of_the_input() -> None:
    """It copies it into the input afterwards; to run such a graph would crash."""
    found: list[fx.Graph] = []

    def keep(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Tensor]]:
        found.append(graph_module.graph)
        return lambda *inputs: [torch.zeros(4, 4)]

    def fill_use_and_free(weight: Tensor, full: Tensor, x: Tensor) -> Tensor:
        weight.untyped_storage().resize_(weight.nbytes)
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
