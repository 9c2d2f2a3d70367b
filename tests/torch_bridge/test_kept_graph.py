"""A Dynamo graph that is compiled once more while the model trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.dynamo_graph import text_of
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.interpret import run_as_traced
from apollo_compile.torch_bridge.kept_graph import KeptGraph


def test_a_model_cannot_be_called_while_another_thread_traces() -> None:
    """Why nothing is compiled in the background; once this fails on a torch, it could be."""
    layer = torch.compile(nn.Linear(2, 2), backend="eager")
    x = torch.ones(1, 2)
    layer(x)
    is_tracing, may_end = threading.Event(), threading.Event()

    def traced(value: torch.Tensor) -> torch.Tensor:
        is_tracing.set()
        may_end.wait()
        return value + 1

    thread = threading.Thread(target=lambda: make_fx(traced)(x))
    thread.start()
    is_tracing.wait()
    try:
        with pytest.raises(RuntimeError, match="using FX to symbolically trace"):
            layer(x)
    finally:
        may_end.set()
        thread.join()
    layer(x)


class Backend:
    """Keeps the graph that Dynamo passes, and runs it as it is."""

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.kept, self.text = KeptGraph(graph_module, example_inputs), text_of(graph_module, example_inputs)
        self.arguments: Sequence[Any] = ()

        def run(*arguments: Any) -> Any:
            self.arguments = arguments
            return graph_module(*arguments)

        return run

    def compile(self) -> tuple[Callable[..., Any], list[dict[str, Any]]]:
        """Compile the kept graph; return that and what AOTAutograd says of its graphs."""
        seen: list[dict[str, Any]] = []

        def inner(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, None]:
            seen.append(kwargs)
            return run_as_traced(graph_module), None

        with self.kept.compiling(self.arguments) as (graph_module, fakes):
            run = compile_with_inductor(
                graph_module, fakes, inner, recompute_masks=False, eager_randomness=True, backward_at_once=True
            )
        return run, seen


def test_a_kept_graph_computes_the_same_with_parameters_in_place() -> None:
    """Forward and gradients, after Dynamo has forgotten the graph; parameters are told from inputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, layer, x = Backend(), nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(4, 3)
    expected = torch.compile(layer, backend=backend)(x)
    run, (forward, backward) = backend.compile()
    (actual,) = run(*backend.arguments)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), list(layer.parameters())), wanted)
    parameters = {id(parameter) for parameter in layer.parameters()}
    places = [index for index, each in enumerate(backend.arguments) if id(each) in parameters]
    assert sorted(forward["static_input_idxs"]) == places and backward["is_backward"]


def test_a_kept_graph_of_sizes_that_change_computes_all_of_them() -> None:
    """With the symbols of Dynamo's trace, and no more assumed about them than Dynamo's guards check."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, layer = Backend(), nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    compiled = torch.compile(layer, backend=backend, dynamic=True)
    compiled(torch.randn(4, 3))
    sized = [backend.arguments[place] for place in backend.kept.sized]
    assert [each if isinstance(each, int) else each.shape for each in sized] == [4, (4, 3)]
    run, (forward, _) = backend.compile()
    assert forward["static_input_idxs"]
    expected = compiled(torch.randn(7, 3))
    (actual,) = run(*backend.arguments)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), list(layer.parameters())), wanted)
    other = Backend()
    torch._dynamo.reset()
    torch.compile(layer, backend=other, dynamic=True)(torch.randn(4, 3))
    kept = other.kept
    with pytest.raises(UnsupportedGraphError, match="some of the dynamic sizes only"), kept.compiling(()) as (_, fakes):
        assert bool(fakes[kept.sized[0]] < 5)


def test_equal_graphs_have_equal_texts() -> None:
    """In every process; another size, another operator or no gradients make another text."""
    texts = []
    for width, operator, has_gradients in (
        (3, torch.sin, True),
        (3, torch.sin, True),
        (4, torch.sin, True),
        (3, torch.cos, True),
        (3, torch.sin, False),
    ):
        torch._dynamo.reset()
        backend = Backend()
        with torch.set_grad_enabled(has_gradients):
            torch.compile(lambda x, f=operator: f(x) + 1, backend=backend)(torch.ones(2, width))
        texts.append(backend.text)
    assert texts[0] == texts[1] and len(set(texts)) == 4
