"""Faults in the midst of a training step that runs as one program."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from tests.end_to_end.models import STRICT

COUNT, SAMPLES = 4, 2

_errors: list[type[BaseException]] = [LookupError]
"""What the operator raises."""


@torch.library.custom_op("apollo_faults::refuse_nan", mutates_args=())
def refuse_nan(x: torch.Tensor, place: str) -> torch.Tensor:
    """Raise where a number is missing, in the forward and in the backward: so one micro-batch can be told to fail."""
    if x.isnan().any():
        raise _errors[-1](f"injected in the {place}")
    return x.clone()


@refuse_nan.register_fake
def _(x: torch.Tensor, place: str) -> torch.Tensor:
    return torch.empty_like(x)


def _refuse_nan_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return refuse_nan(gradient, "backward"), None


refuse_nan.register_autograd(_refuse_nan_backward)


class _Chain(nn.Module):
    """Layers that feed each other, each worth a segment; the first and the last can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = refuse_nan(torch.tanh(layer(x)), "forward")
        return x


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(COUNT * SAMPLES, 64, generator=generator) for name in ("x", "y")}


def _loop(
    model: nn.Module, batch: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, clip: float | None
) -> torch.Tensor:
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in split_evenly(batch, COUNT):
        loss = _loss(model, part) * (1 / COUNT)
        loss.backward()
        total = total + loss.detach()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    _errors[1:] = []


@pytest.mark.parametrize(
    ("optimizer", "clip"), [(torch.optim.SGD, None), (torch.optim.AdamW, 0.5)], ids=["SGD", "AdamW"]
)
def test_an_error_in_a_micro_batch_leaves_weights_and_optimizer_alone_and_the_next_step_works(
    optimizer: type[torch.optim.Optimizer], clip: float | None
) -> None:
    """The third one of four, or the last: the loop without the step that failed ends the same.

    In the backward of the last one the gradients of some modules are final, which waits for the others if they are
    clipped.
    """
    torch.manual_seed(0)
    model = _Chain()
    expected = copy.deepcopy(model)
    own, others = (optimizer(each.parameters(), lr=0.01) for each in (model, expected))  # type: ignore[call-arg]
    options = {**STRICT, "runtime.bodies": "eager", "plan.replan": False, "plan.min_gain": 0.0}
    step = compile_step(
        model, _loss, own, microbatches=COUNT, clip_grad_norm=clip, keep_gradients=True, options=options
    )
    seed = 0

    def take_both() -> None:
        nonlocal seed
        seed += 1
        torch.testing.assert_close(
            step(_batch(seed)), _loop(expected, _batch(seed), others, clip), rtol=1e-4, atol=1e-5
        )
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5)

    for _ in range(3):
        take_both()
    assert step.verdicts == [Variant.PLAN]
    affinity = os.sched_getaffinity(0)
    faults = [(2, "forward", "x"), (2, "backward", "y"), (COUNT - 1, "forward", "x")]
    faults += [] if clip is None else [(COUNT - 1, "backward", "y")]
    for error in (LookupError, KeyboardInterrupt):
        _errors.append(error)
        for number, place, name in faults:
            broken = _batch(100)
            broken[name][number * SAMPLES] = torch.nan
            before = copy.deepcopy([model.state_dict(), own.state_dict()["state"]])
            with pytest.raises(error, match=f"injected in the {place}") as caught:
                step(broken)
            assert type(caught.value) is error
            torch.testing.assert_close([model.state_dict(), own.state_dict()["state"]], before, rtol=0, atol=0)
            assert os.sched_getaffinity(0) == affinity
            assert torch.ones(2**20).sum() == 2**20  # a parallel region: the team has been released
            take_both()
    assert step.verdicts == [Variant.PLAN]
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)
