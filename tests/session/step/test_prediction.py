"""A step is planned before training as it will be."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.errors import TargetError
from apollo_compile.ir import Variant
from apollo_compile.tools.explain_step import explain_step
from apollo_compile.tools.report import report
from tests.end_to_end.twins import EAGER, Batch, Chain, chain_batch, chain_loss, compile_step, state_of


def breaks(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss after a graph break."""
    torch._dynamo.graph_break()
    return chain_loss(model, batch)


kept: list[torch.Tensor] = []


def keeps(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, and keep twice as much."""
    loss = chain_loss(model, batch)
    kept.append(loss * 2)
    return loss


def test_a_step_is_planned_without_training_as_it_will_be() -> None:
    """The prediction has the segments of the program that runs later, and changes nothing."""
    model = Chain(dropout=0.5)
    own = torch.optim.AdamW(model.parameters())
    before = state_of(model)
    settings = {"microbatches": 2, "clip_grad_norm": 1.0, "options": EAGER}
    planned = explain_step(model, chain_loss, chain_batch(0), own, **settings)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters()) and not own.state
    step = compile_step(model, chain_loss, own, **settings)
    for seed in range(2):
        step(chain_batch(seed))
    (difference,) = planned.diff(report(step)).graphs  # of one step, though Dynamo has given it another number
    assert difference.before.name != difference.after.name
    assert difference.only_before == difference.only_after == ()
    assert str(planned).startswith("planned")


def test_a_step_that_keeps_gradients_is_planned_with_their_memory() -> None:
    """Gradients, here the largest tensors, live until their layer is updated unless they are kept."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    own = torch.optim.AdamW(model.parameters())
    options = {**EAGER, "plan.planner": "serial"}
    planned = partial(explain_step, model, lambda m, x: m(x).square().mean(), torch.randn(2, 128), own, options=options)
    larger, released = (planned(keep_gradients=keep).graphs[0].peak_bytes for keep in (True, False))
    assert larger > 1.5 * released


@pytest.mark.parametrize(
    ("loss_fn", "model", "reason"),
    [
        (breaks, Chain(), rf"the loss function is not one graph: .* in .*{__file__}:\d+: "),
        (
            chain_loss,
            nn.BatchNorm1d(16, momentum=None),
            r"the loss function is not one graph: .* in .*batchnorm\.py:\d+: ",
        ),
        (keeps, Chain(), "the loss function keeps tensors besides those that it returns"),
    ],
    ids=["a graph break", "a number that is read", "a tensor that is kept"],
)
def test_a_step_that_cannot_be_linked_is_explained_as_a_loop(
    loss_fn: Callable[..., Any], model: nn.Module, reason: str
) -> None:
    """With the reason and the place, as it will run."""
    planned = explain_step(model, loss_fn, chain_batch(0), microbatches=2, options=EAGER)
    (state,) = planned.states
    assert re.search(f"{Variant.LOOP}: {reason}", state.detail)
    assert f"falls back: {Variant.LOOP}: " in str(planned)


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (lambda model, batch: model(batch["x"]), r"returned a Tensor of shape \[16, 16\] as the loss"),
        (lambda model, batch: chain_loss(model, batch).detach(), "the loss needs no gradient"),
    ],
    ids=["a tensor with dimensions", "no gradient"],
)
def test_a_step_that_would_fail_is_not_planned(loss_fn: Callable[..., Any], reason: str) -> None:
    """Refuse in words what `compile_step` or its backward would refuse."""
    with pytest.raises(TargetError, match=reason):
        explain_step(Chain(), loss_fn, chain_batch(0), options=EAGER)
