"""An LSTM that reads the batch itself is trained as in eager, and one for inference keeps its operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from apollo_compile.torch_bridge.upstream_bugs.untrained_lstms import train_lstms
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

ALLOWED = torch._dynamo.config.patch(allow_rnn=True)  # type: ignore[no-untyped-call]


def _compile(model: nn.Module, *, is_fixed: bool) -> tuple[Callable[..., Any], list[str]]:
    """Return the compiled model, and the operators of its forwards."""
    operators: list[str] = []

    def keep(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        operators.extend(str(node.target) for node in graph_module.graph.nodes)
        return make_boxed_func(graph_module.forward)

    aot = aot_autograd(fw_compiler=keep)

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if not is_fixed:
            return aot(graph_module, example_inputs)
        with train_lstms():
            return aot(graph_module, example_inputs)

    return torch.compile(model, backend=compile_graph), operators


@ALLOWED
def test_torch_does_not_train_an_lstm_that_reads_the_batch() -> None:
    """Saving the workspace for the backward raises."""
    compiled, _ = _compile(nn.LSTM(6, 8), is_fixed=False)
    try:
        compiled(torch.ones(5, 4, 6))
        is_there = False
    except (AssertionError, TypeError):
        is_there = True
    assert_as_listed("untrained_lstms.py", is_there=is_there)


@ALLOWED
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=len)
def test_gradients_of_an_lstm_are_those_of_eager(settings: dict[str, Any]) -> None:
    """Compare the gradients of all its weights with those of eager."""
    model = nn.LSTM(6, 8, **settings)
    expected = copy.deepcopy(model)
    compiled, _ = _compile(model, is_fixed=True)
    x = torch.randn(5, 4, 6)
    for run in (compiled, expected):
        run(x)[0].square().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@ALLOWED
def test_inference_keeps_the_operator_of_torch() -> None:
    """It is one call, and fast."""
    model, x = nn.LSTM(6, 8), torch.randn(5, 4, 6)
    (fixed, ours), (plain, theirs) = (_compile(model, is_fixed=is_fixed) for is_fixed in (True, False))
    with torch.no_grad():
        torch.testing.assert_close(fixed(x), plain(x))
    assert ours == theirs
