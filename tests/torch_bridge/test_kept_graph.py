"""A Dynamo graph that is compiled once more while the model trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.interpret import run_as_traced
from apollo_compile.torch_bridge.kept_graph import KeptGraph


@pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.14.1", reason="it can be called there")
def test_a_model_cannot_be_called_while_another_thread_traces() -> None:
    """Why nothing is compiled in the background; once no supported torch fails here, it could be."""
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


def test_a_kept_graph_computes_the_same_with_parameters_in_place() -> None:
    """Forward and gradients, after Dynamo has forgotten the graph; parameters are told from inputs."""
    kept: list[KeptGraph] = []
    given: list[Any] = []
    seen: list[dict[str, Any]] = []

    def keep(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        kept.append(KeptGraph(graph_module))
        return lambda *arguments: given.extend(arguments) or graph_module(*arguments)

    def inner(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, None]:
        seen.append(kwargs)
        return run_as_traced(graph_module), None

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(4, 3)
    expected = torch.compile(layer, backend=keep)(x)
    with kept[0].compiling(given) as (graph_module, fakes):
        run = compile_with_inductor(
            graph_module, fakes, inner, recompute_masks=False, eager_randomness=True, backward_at_once=True
        )
    (actual,) = run(*given)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), list(layer.parameters())), wanted)
    parameters = {id(parameter) for parameter in layer.parameters()}
    places = [index for index, each in enumerate(given) if id(each) in parameters]
    forward, backward = seen
    assert sorted(forward["static_input_idxs"]) == places and backward["is_backward"]
