"""Training until a comparison is over, beside AOTAutograd's cache, or without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters

from apollo_compile.autotune.comparison import MAX_ROUNDS, MAX_STEPS_PER_TURN
from apollo_compile.session import registry
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.interpret import interpret_bodies, interpret_whole
from tests.end_to_end.models import STRICT, Training, TwoTowers, train, two_tower_inputs

AUTOTUNED = {
    "debug.strict": True,
    "device.profile": "cpu",
    "plan.min_gain": 0.0,
    "plan.remember": False,
    "plan.replan": False,
    "plan.time_limit_s": 0.5,
}
"""The packaged profile gives two towers lanes on every machine with two cores; times measured on a busy one may not."""

ENOUGH = 30 + (2 + 2) * MAX_ROUNDS * MAX_STEPS_PER_TURN
"""Steps after which learning is over, and two comparisons of two, the second with Inductor."""

Inputs = tuple[torch.Tensor, ...]


def compiled_towers(**options: object) -> tuple[nn.Module, Inputs, CompiledModel]:
    """Return two towers, their inputs and what was compiled for a training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options={**AUTOTUNED, **options})
    run(*inputs).square().mean().backward()
    model.zero_grad()
    (found,) = registry.find_models(model)
    return run, inputs, found


def train_until_settled(run: nn.Module, inputs: Inputs) -> None:
    """Take steps until nothing is being decided; later ones could show drift, which opens the comparison again."""
    for _ in range(ENOUGH):
        output = run(*inputs)
        if output.requires_grad:
            output.square().mean().backward()
        if registry.is_settled(run):
            return
    pytest.fail(f"not settled after {ENOUGH} steps")


def warm(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Warm start", subject)


def hits() -> tuple[int, int]:
    """Return how many Dynamo graphs came from AOTAutograd's cache, and how many it could not give."""
    counted = counters["aot_autograd"]
    return counted["autograd_cache_hit"], counted["autograd_cache_miss"]


def training_of(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> tuple[Training, CompiledModel]:
    """Train a copy of `model`; return losses, gradients and state, and what was compiled for it."""
    torch.manual_seed(1)
    training = train(model, lambda run: run(*inputs).square().mean(), backend="apollo", options={**STRICT, **options})
    return training, registry.compiled_models()[-1]


def interpret_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile, and all our compiles, interpret: a compiler takes most of the time, and changes nothing."""

    def compile_plainly(graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Any, **_: Any) -> Any:
        return compile_with_inductor(
            graph_module,
            example_inputs,
            lambda graph, *_, **__: (interpret_whole(graph), None),
            recompute_masks=False,
            eager_randomness=True,
        )

    monkeypatch.setattr("apollo_compile.autotune.tuner._comparing", None)  # a model of another test
    monkeypatch.setattr("apollo_compile.session.compile.compile_plainly", compile_plainly)
    monkeypatch.setattr("apollo_compile.session.compile.compile_again", lambda graph, *_, **__: interpret_whole(graph))
    monkeypatch.setattr("apollo_compile.session.bodies.compile_bodies", lambda pieces, **_: interpret_bodies(pieces))
