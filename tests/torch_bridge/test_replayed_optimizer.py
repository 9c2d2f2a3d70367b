"""Steps of optimizers that a CUDA graph repeats: what they read when it changes, and what has to be captured again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from apollo_compile.torch_bridge.replayed_optimizer import (
    FEWEST_STEPS,
    MOST_QUICK_CHANGES,
    ReplayedOptimizer,
    problem_of_replays,
)

CPU = torch.device("cpu")


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    """Return parameters."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(count)]


def adamw(members: Any, **settings: Any) -> torch.optim.AdamW:
    """Return an optimizer that has taken a step, so that it has state."""
    optimizer = torch.optim.AdamW(members, **{"lr": 0.01, "fused": True, **settings})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def stepper(optimizer: torch.optim.Optimizer) -> ReplayedOptimizer:
    """Return its steps, which have been looked at."""
    made = ReplayedOptimizer(optimizer, [each for group in optimizer.param_groups for each in group["params"]], CPU)
    assert made.reason_against() is None and not made.take_outdated()
    return made


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_rates_are_those_of_a_scheduler_without_another_capture(rate: Any) -> None:
    """Each group has its own; steps give what the optimizer alone gives."""
    expected, found = parameters(), parameters()
    pairs = []
    for members in (expected, found):
        groups: list[dict[str, Any]] = [{"params": [members[0]]}, {"params": [members[1]], "lr": 0.5}]
        optimizer = adamw(groups, lr=copy.deepcopy(rate))
        pairs.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    steps = stepper(pairs[1][0])
    for number in range(4):
        gradients = [torch.full_like(each, number - 1.5) for each in found]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient
        pairs[0][0].step()
        steps.refresh()
        with torch.no_grad():
            steps.step(found, gradients)
        steps.note_taken()
        assert not steps.take_outdated() and steps.reason_against() is None
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        for _, scheduler in pairs:
            scheduler.step()


def test_state_that_moves_is_captured_again() -> None:
    """Once; so are other settings and a loaded state, as `device/gpu/test_steps.py` shows."""
    optimizer = adamw(parameters())
    steps = stepper(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone()
    steps.refresh()
    assert steps.take_outdated() and steps.reason_against() is None
    steps.refresh()
    assert not steps.take_outdated()


def test_settings_that_change_in_every_step_and_counts_on_the_host_make_steps_loops() -> None:
    """As betas do with `OneCycleLR`, until they rest; and as a checkpoint has counts, which no kernel could read."""
    optimizer = adamw(parameters())
    steps = stepper(optimizer)
    for number in range(MOST_QUICK_CHANGES):
        assert steps.reason_against() is None
        optimizer.param_groups[0]["betas"] = (0.8 - number / 100, 0.999)
        steps.refresh()
    assert "change again and again" in (steps.reason_against() or "")
    for _ in range(FEWEST_STEPS):
        steps.refresh()
    assert steps.reason_against() is None
    optimizer.load_state_dict(adamw(parameters(), fused=None).state_dict())
    steps.refresh()
    assert "counts steps on the host" in (steps.reason_against() or "")


def test_state_is_not_made_in_a_capture() -> None:
    """A parameter that was added has none yet: the optimizer makes it in a loop."""
    known, added = parameters()
    optimizer = adamw([known])
    steps = ReplayedOptimizer(optimizer, [known, added], CPU)
    assert steps.reason_against() is None, "what the optimizer does not have is not stepped"
    optimizer.add_param_group({"params": [added]})
    steps.refresh()
    assert "no state for some parameters yet" in (steps.reason_against() or "")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), None),
        (lambda p: torch.optim.Adam(p, capturable=True, foreach=True), None),
        (lambda p: torch.optim.AdamW(p), "counts steps on the host"),
        (lambda p: torch.optim.SGD(p), None),
        (lambda p: torch.optim.SGD(p, foreach=True), "learning rate of the host"),
        (lambda p: torch.optim.RMSprop(p, capturable=True), "numbers of the host"),
        (lambda p: torch.optim.AdamW(p, fused=True, weight_decay=torch.tensor(0.1)), "besides the learning rate"),
    ],
)
def test_only_kernels_that_read_the_device_are_replayed(
    make: Callable[[Any], torch.optim.Optimizer], expected: str | None
) -> None:
    """The reason says what to change. A group may be empty, as of parameters without weight decay."""
    problem = problem_of_replays(make(parameters()))
    assert problem is None if expected is None else expected in (problem or "")
    stepper(torch.optim.SGD([{"params": parameters(1)}, {"params": []}], lr=0.1))
