"""Faults in the midst of a training step that runs as one program."""

from __future__ import annotations

import copy
import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.twins import EAGER, Twins, chain_loss

COUNT, SAMPLES = 4, 2

_raised: dict[str, type[BaseException]] = {}
"""What the operator raises, as `error`."""


@torch.library.custom_op("apollo_faults::refuse_nan", mutates_args=())
def refuse_nan(x: torch.Tensor, place: str) -> torch.Tensor:
    """Raise where a number is missing, in the forward and in the backward: so one micro-batch can be told to fail."""
    if x.isnan().any():
        raise _raised["error"](f"injected in the {place}")
    return x.clone()


@refuse_nan.register_fake
def _(x: torch.Tensor, place: str) -> torch.Tensor:
    return torch.empty_like(x)


def _refuse_nan_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return refuse_nan(gradient, "backward"), None


refuse_nan.register_autograd(_refuse_nan_backward)


def _chain() -> nn.Module:
    """Return layers that feed each other, each worth a segment; the first and the last can fail."""
    return Wrapped(_run_chain, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(3)))


def _run_chain(own: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in own.layers:
        x = refuse_nan(torch.tanh(layer(x)), "forward")
    return x


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(COUNT * SAMPLES, 64, generator=generator) for name in ("x", "y")}


@pytest.mark.parametrize(
    ("optimizer", "clip"), [(torch.optim.SGD, None), (torch.optim.AdamW, 0.5)], ids=["SGD", "AdamW"]
)
def test_an_error_in_a_micro_batch_leaves_weights_and_optimizer_alone_and_the_next_step_works(
    optimizer: type[torch.optim.Optimizer], clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third one of four, or the last: the loop without the step that failed ends the same.

    In the backward of the last one the gradients of some modules are final, which waits for the others if they are
    clipped.
    """
    options = {**EAGER, "debug.strict": True}
    twins = Twins(_chain, chain_loss, partial(optimizer, lr=0.01), count=COUNT, clip_grad_norm=clip, options=options)
    batches = map(_batch, itertools.count())

    def state() -> list[Any]:
        return [twins.model.state_dict(), twins.own.state_dict()["state"]]

    for _ in range(3):
        twins.take(next(batches))
    assert twins.step.verdicts == [Variant.PLAN]
    affinity = os.sched_getaffinity(0)
    faults = [(2, "forward", "x"), (2, "backward", "y"), (COUNT - 1, "forward", "x")]
    faults += [] if clip is None else [(COUNT - 1, "backward", "y")]
    for error in (LookupError, KeyboardInterrupt):
        monkeypatch.setitem(_raised, "error", error)
        for number, place, name in faults:
            broken = _batch(100)
            broken[name][number * SAMPLES] = torch.nan
            before = copy.deepcopy(state())
            with pytest.raises(error, match=f"injected in the {place}") as caught:
                twins.step(broken)
            assert type(caught.value) is error
            torch.testing.assert_close(state(), before, rtol=0, atol=0)
            assert os.sched_getaffinity(0) == affinity
            assert torch.ones(2**20).sum() == 2**20  # a parallel region: the team has been released
            twins.take(next(batches))
    assert twins.step.verdicts == [Variant.PLAN]
