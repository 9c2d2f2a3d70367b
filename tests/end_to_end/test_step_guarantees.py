"""Whole steps train as the loop does: with shared memory and random numbers, and after errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.step.tuning import StepTuner
from tests.end_to_end.twins import EAGER, Twins, compile_step

COMPARED = {**EAGER, "plan.autotune": True, "plan.compile_share": 1e6}
"""Every variant takes steps, the traced step as soon as something has won."""


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of any model here."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def batch_of(seed: int) -> torch.Tensor:
    """Return a batch."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def alike(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `Twins` will make, which shares memory as a copy would not."""
    torch.manual_seed(0)
    return make()


class Towers(nn.Module):
    """Two towers that nothing joins but their sum."""

    def __init__(self, *, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth)))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.left(x) + self.right(x)
        return y


# ----------------------------------------------------------------------------------------------------- shared memory


def siamese() -> nn.Module:
    """Return towers whose parameters are tensors of their own in the same memory."""
    towers = Towers(depth=3)
    for one, other in zip(towers.left.parameters(), towers.right.parameters(), strict=True):
        other.data = one.data
    return towers


def flat() -> nn.Module:
    """Return towers whose parameters are neighbours in one tensor, which share nothing."""
    towers = Towers()
    members = list(towers.parameters())
    pieces = torch.cat([each.detach().flatten() for each in members]).split([each.numel() for each in members])
    for each, piece in zip(members, pieces, strict=True):
        each.data = piece.view_as(each)
    return towers


def sgd(members: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose updates are large."""
    return torch.optim.SGD(members, lr=0.5)


@pytest.mark.parametrize("make", [siamese, flat])
def test_state_that_shares_memory_is_updated_when_nothing_reads_it_any_more(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer steps after the program then, which one line says; neighbours in memory need no such care."""
    twins = Twins(make, loss_of, sgd, options=COMPARED, expected=alike(make))
    with caplog.at_level(logging.INFO, "apollo_compile"):
        for number in range(20):
            twins.take(batch_of(number))
    assert ("shares memory with another input" in caplog.text) is (make is not flat)
    tuners = twins.step.tuners
    assert tuners and (tuners[0].program.optimizer is not None) is (make is flat)


def test_memory_that_is_shared_later_is_seen() -> None:
    """Parameters that get the memory of others, and batches in memory of a parameter, between two steps."""
    twins = Twins(Towers, loss_of, sgd)
    for number in range(16):
        batches = [batch_of(number)] * 2
        if number == 5:
            for each in twins.both:
                each.right[0][0].weight.data = each.left[0][0].weight.data
        if number > 10:
            batches = [each.left[1][0].weight.detach()[:8] for each in twins.both]
        twins.take(*batches)
        assert ("shares memory" in str(twins.step.verdicts)) is (number >= 5)


# ---------------------------------------------------------------------------------------------------- random numbers


@pytest.fixture
def every_variant(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """Note which variants ran steps."""
    ran: set[Variant] = set()
    begin = StepTuner.begin_step

    def note(tuner: StepTuner, number: int) -> Variant:
        variant = begin(tuner, number)
        ran.add(variant)
        return variant

    monkeypatch.setattr(StepTuner, "begin_step", note)
    return ran


@pytest.mark.parametrize(
    ("bodies", "count", "norm"),
    [
        ("eager", 1, False),
        ("native", 1, False),
        *(pytest.param("eager", count, True, marks=pytest.mark.soak) for count in (1, 2)),
        *(
            pytest.param("native", count, norm, marks=pytest.mark.soak)
            for count, norm in ((1, True), (2, False), (2, True))
        ),
    ],
)
def test_a_seed_decides_the_numbers_whatever_runs(
    bodies: str, count: int, norm: bool, every_variant: set[Variant]
) -> None:
    """The same seed before every step: one loss, and one state of the generator behind it."""
    model = nn.Sequential(Towers(dropout=0.5, depth=1), nn.BatchNorm1d(16) if norm else nn.Identity())
    step = compile_step(model, loss_of, microbatches=count, options={**COMPARED, "runtime.bodies": bodies})
    found = set()
    for _ in range(3000):
        model.zero_grad()
        torch.manual_seed(1)
        loss = float(step(batch_of(0)))
        (gradient, *_) = (each.grad for each in model.parameters())
        assert gradient is not None
        found.add((round(loss, 4), round(float(gradient.norm()), 4), int(torch.get_rng_state().sum())))
        if step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break
    assert len(found) == 1
    assert {Variant.LOOP, Variant.TRACED} < every_variant


def test_a_step_does_not_wait_for_a_compile_that_its_training_does_not_pay_for(every_variant: set[Variant]) -> None:
    """Within the first steps of a run, Inductor compiles no whole step to compare with."""
    step = compile_step(Towers(), loss_of, options={**EAGER, "plan.autotune": True})
    while not (step.tuners and step.tuners[0].is_settled):
        step(batch_of(0))
    assert Variant.TRACED not in every_variant
    assert step.tuners[0].is_more_to_come


# ------------------------------------------------------------------------------------------------ clipping and errors


@pytest.mark.parametrize("place", ["first", "last"])
def test_an_error_inside_a_program_says_which_parameters_were_updated(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are as they were; where none was, nothing is said."""
    model = Towers(depth=1)
    optimizer = sgd(model.parameters())
    step = compile_step(model, loss_of, optimizer, options=EAGER)
    for number in range(3):
        step(batch_of(number))
    parts = step.tuners[0].program.optimizer
    assert parts is not None
    take_part, num_taken = parts.step, 0

    def fail(parameters: Any, gradients: Any) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken == (1 if place == "first" else 2):
            raise RuntimeError("the optimizer failed")
        take_part(parameters, gradients)

    monkeypatch.setattr(parts, "step", fail)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with pytest.raises(RuntimeError, match="the optimizer failed") as raised:
        step(batch_of(3))
    changed = [name for name, each in model.named_parameters() if not torch.equal(each, before[name])]
    notes = "".join(note for note in getattr(raised.value, "__notes__", []) if "updated" in note)
    assert bool(changed) is bool(notes) is (place == "last")
    assert all(name in notes for name in changed)
    assert not any(name in notes for name in before if name not in changed)
