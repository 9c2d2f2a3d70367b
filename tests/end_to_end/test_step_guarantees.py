"""Whole steps train as the loop does: in any precision, with shared memory and random numbers, and after errors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.step import Step, compile_step
from tests.end_to_end.test_step import EAGER

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]

COMPARED = {**EAGER, "plan.autotune": True, "plan.compile_share": 1e6}
"""Every variant takes steps, the traced step as soon as something has won."""


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of any model here."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def batch_of(seed: int, width: int = 16) -> torch.Tensor:
    """Return a batch."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


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


def take(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, count: int) -> torch.Tensor:
    """Take a step as users write it."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in batch.chunk(count):
        loss = loss_of(model, part) / count
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def assert_trains_alike(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    count: int = 1,
    options: dict[str, Any],
    num_steps: int = 12,
    until_settled: bool = False,
    tolerance: float = 1e-4,
    other: nn.Module | None = None,
) -> Step:
    """Train a model by whole steps and in eager, and compare everything after every step.

    `until_settled` ends early where every variant was compared.
    """
    torch._dynamo.reset()
    expected = copy.deepcopy(model) if other is None else other
    own, others = make_optimizer(model.parameters()), make_optimizer(expected.parameters())
    step = compile_step(model, loss_of, own, microbatches=count, keep_gradients=True, options=options)
    dtype = next(model.parameters()).dtype
    for number in range(num_steps):
        batch = batch_of(number, 64 if dtype is torch.bfloat16 else 16).to(dtype)
        loss, wanted = step(batch), take(expected, others, batch, count)
        torch.testing.assert_close(loss, wanted.to(loss.dtype), rtol=tolerance, atol=tolerance)
        for (name, mine), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=f"{name} of step {number}")
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
        if until_settled and step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break
    torch.testing.assert_close(own.state_dict(), others.state_dict(), rtol=tolerance, atol=tolerance)
    return step


# --------------------------------------------------------------------------------------------------- lower precision


class Wide(nn.Module):
    """Two towers whose outputs are far from their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = 3 * (self.left(x) + self.right(x) - 1)
        return y


@pytest.mark.parametrize("options", [EAGER, COMPARED], ids=["program", "compared"])
@pytest.mark.parametrize("count", [1, 2])
def test_models_of_lower_precision_train(count: int, options: dict[str, Any]) -> None:
    """By SGD with momentum: nearly every weight changes, and as in eager."""
    torch.manual_seed(0)
    model = Wide().to(torch.bfloat16)
    before = [each.detach().clone() for each in model.parameters()]
    assert_trains_alike(
        model,
        lambda members: torch.optim.SGD(members, lr=0.5, momentum=0.9),
        count=count,
        options=options,
        num_steps=30,
        tolerance=0.06,
    )
    changed = [float((a != b).float().mean()) for a, b in zip(model.parameters(), before, strict=True)]
    assert min(changed) > 0.9


# -------------------------------------------------------------------------------------------- parameters with gaps


class Strided(nn.Module):
    """Two towers whose weights are every other column of a larger matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.around = [torch.randn(16, 32) / 4 for _ in range(2)]
        self.left, self.right = (nn.Parameter(each[:, ::2]) for each in self.around)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(x @ self.left) + torch.tanh(x @ self.right)
        return y


@pytest.mark.parametrize("options", [EAGER, COMPARED], ids=["program", "compared"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_between_the_elements_of_parameters_stays(count: int, options: dict[str, Any]) -> None:
    """With SGD, whose fused kernel goes through all memory from the first element on."""
    torch.manual_seed(0)
    model = Strided()
    before = [each.clone() for each in model.around]
    expected = Strided()
    expected.load_state_dict(model.state_dict())
    assert_trains_alike(model, sgd, count=count, options=options, num_steps=20, other=expected)
    for matrix, old in zip(model.around, before, strict=True):
        torch.testing.assert_close(matrix[:, 1::2], old[:, 1::2], rtol=0, atol=0)
        assert not torch.equal(matrix[:, ::2], old[:, ::2])


# ----------------------------------------------------------------------------------------------------- shared memory


class Siamese(nn.Module):
    """Towers whose parameters are tensors of their own in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers(depth=3)
        for one, other in zip(self.towers.left.parameters(), self.towers.right.parameters(), strict=True):
            other.data = one.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.towers(x)
        return y


class Mirrored(nn.Module):
    """A layer whose weight is read a second time as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            self.register_buffer(f"mirror{number}", layer.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x @ self.get_buffer(f"mirror{number}")
        return x


class Flat(nn.Module):
    """Parameters that are neighbours in one tensor, which share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()
        members = list(self.towers.parameters())
        flat = torch.cat([each.detach().flatten() for each in members])
        for each, piece in zip(members, flat.split([each.numel() for each in members]), strict=True):
            each.data = piece.view_as(each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.towers(x)
        return y


def sgd(members: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose updates are large."""
    return torch.optim.SGD(members, lr=0.5)


@pytest.mark.parametrize("options", [EAGER, COMPARED], ids=["program", "compared"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", [Siamese, Mirrored, Flat])
def test_state_that_shares_memory_is_updated_when_nothing_reads_it_any_more(
    make: Callable[[], nn.Module], count: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer steps after the program then, which one line says; neighbours in memory need no such care."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    model, expected = make(), make()
    expected.load_state_dict(model.state_dict())
    with caplog.at_level(logging.INFO, "apollo_compile"):
        step = assert_trains_alike(model, sgd, count=count, options=options, num_steps=20, other=expected)
    assert ("shares memory with another input" in caplog.text) is (make is not Flat)
    assert step.tuners and (step.tuners[0].program.optimizer is not None) is (make is Flat)


def test_memory_that_is_shared_later_is_seen() -> None:
    """Parameters that get the memory of others, and batches in memory of a parameter, between two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Towers()
    expected = copy.deepcopy(model)
    own, others = sgd(model.parameters()), sgd(expected.parameters())
    step = compile_step(model, loss_of, own, keep_gradients=True, options=EAGER)
    for number in range(16):
        batches = [batch_of(number)] * 2
        if number == 5:
            for each in (model, expected):
                each.right[0][0].weight.data = each.left[0][0].weight.data  # type: ignore[union-attr]
        if number > 10:
            batches = [each.left[1][0].weight.detach()[:8] for each in (model, expected)]  # type: ignore[index]
        loss, wanted = step(batches[0]), take(expected, others, batches[1], 1)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
        assert ("shares memory" in str(step.verdicts)) is (number >= 5)


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
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Towers(dropout=0.5, depth=1), nn.BatchNorm1d(16) if norm else nn.Identity())
    step = compile_step(
        model, loss_of, microbatches=count, keep_gradients=True, options={**COMPARED, "runtime.bodies": bodies}
    )
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
    torch._dynamo.reset()
    step = compile_step(Towers(), loss_of, keep_gradients=True, options={**EAGER, "plan.autotune": True})
    while not (step.tuners and step.tuners[0].is_settled):
        step(batch_of(0))
    assert Variant.TRACED not in every_variant
    assert step.tuners[0].is_more_to_come


def test_running_statistics_are_those_of_the_loop_when_inductor_traces_the_step(every_variant: set[Variant]) -> None:
    """Its first step is taken twice, and counts once."""
    torch.manual_seed(0)
    model = nn.Sequential(Towers(), nn.BatchNorm1d(16))
    assert_trains_alike(model, sgd, options={**COMPARED, "plan.min_gain": 0.0}, num_steps=3000, until_settled=True)
    assert Variant.TRACED in every_variant


# ------------------------------------------------------------------------------------------------ clipping and errors


class Mixed(nn.Module):
    """A tower with a factor of lower precision, which has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Towers()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.tower(x) * self.factor
        return y


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_of_all_dtypes_are_clipped_in_place(make: Callable[..., torch.optim.Optimizer]) -> None:
    """One without dimensions would take the dtype of the factor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mixed()
    expected = copy.deepcopy(model)
    own, others = make(model.parameters(), lr=0.1), make(expected.parameters(), lr=0.1)
    step = compile_step(model, loss_of, own, clip_grad_norm=0.01, keep_gradients=True, options=EAGER)
    for number in range(5):
        batch = batch_of(number)
        others.zero_grad()
        wanted = loss_of(expected, batch)
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        others.step()
        torch.testing.assert_close(step(batch), wanted.detach(), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-6)
    assert all("loop" not in verdict for verdict in step.verdicts) and step.verdicts


@pytest.mark.parametrize("place", ["first", "last"])
def test_an_error_inside_a_program_says_which_parameters_were_updated(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are as they were; where none was, nothing is said."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Towers(depth=1)
    optimizer = sgd(model.parameters())
    step = compile_step(model, loss_of, optimizer, keep_gradients=True, options=EAGER)
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
