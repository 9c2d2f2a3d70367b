"""Compiled loss functions are linked into programs; where that cannot be, a line says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.session.step.split import split_evenly
from apollo_compile.tools.report import report, status
from tests.end_to_end import twins
from tests.end_to_end.models import TwoTowers
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.step_cases.parameters import flatten_all
from tests.end_to_end.step_cases.turns import compile_nothing
from tests.session.step.towers import COMPARED, batch_of, loss_of, make_towers, sgd


def siamese() -> nn.Module:
    """Return towers whose parameters are tensors of their own in the same memory."""
    towers = make_towers(depth=3)
    for one, other in zip(towers.left.parameters(), towers.right.parameters(), strict=True):
        other.data = one.data
    return towers


def flat() -> nn.Module:
    """Return towers whose parameters are neighbours in one tensor, which share nothing."""
    towers = make_towers()
    flatten_all(towers)
    return towers


@pytest.mark.parametrize("make", [siamese, flat])
def test_state_that_shares_memory_is_updated_when_nothing_reads_it_any_more(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, info_log: pytest.LogCaptureFixture
) -> None:
    """The optimizer steps after the program then, which one line says; neighbours in memory need no such care."""
    compile_nothing(monkeypatch)
    torch.manual_seed(0)
    alike = make()  # as `Twins` makes it: a copy would share no memory
    pair = twins.Twins(make, loss_of, sgd, options=COMPARED, expected=alike)
    for number in range(20):
        pair.take(batch_of(number))
    assert ("shares memory with another input" in info_log.text) is (make is not flat)
    tuners = pair.step.tuners
    assert tuners and (tuners[0].program.optimizer is not None) is (make is flat)


def test_a_loss_that_the_loss_function_keeps_has_its_value() -> None:
    """The usual way to log it: Dynamo stores what the graph returned, before a program has run."""
    logs: dict[str, torch.Tensor] = {}

    def keep(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
        logs["loss"] = twins.chain_loss(model, batch)
        return logs["loss"]

    step = twins.compile_step(twins.Chain(), keep, options=twins.EAGER)
    for seed in range(4):
        loss = step(twins.chain_batch(seed))
        torch.testing.assert_close(logs["loss"].detach(), loss)
    assert twins.ran_as_program(step)


def test_a_tensor_that_is_kept_may_be_read_by_the_next_micro_batch() -> None:
    """Then a step is a loop, since no program could pass it on in time."""
    before = {"loss": torch.zeros(())}

    def loss_fn(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
        loss = twins.towers_loss(model, batch) + before["loss"]
        before["loss"] = loss.detach()
        return loss

    model = TwoTowers(depth=1)
    step = twins.compile_step(model, loss_fn, microbatches=2, options=twins.EAGER)
    found = [step(twins.towers_batch(seed)) for seed in range(6)]
    before["loss"] = torch.zeros(())
    with torch.no_grad():
        parts = [split_evenly(twins.towers_batch(seed), 2) for seed in range(6)]
        expected = [torch.stack([loss_fn(model, part) for part in each]).mean() for each in parts]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def keeps(model: Any, batch: twins.Batch) -> Any:
    """Return the loss, as a tensor and as a number, which the model keeps."""
    loss = twins.chain_loss(model.layer, batch)
    model.latest = loss.item()
    return loss, {"loss": model.latest}


def prints(model: nn.Module, batch: twins.Batch) -> Any:
    """Return the loss twice, and print a line."""
    print("a step")
    return model(batch)


def counts(model: nn.Module, batch: twins.Batch) -> Any:
    """Return the loss, and a whole number that is read."""
    scores = model.layer(batch["x"])
    return scores.square().mean(), {"positive": (scores > 0).sum().item()}


@pytest.mark.parametrize(
    "loss_fn", [lambda model, batch: model(batch), prints, counts], ids=["keeps", "prints", "counts"]
)
def test_a_loss_function_that_logs_is_a_loop_and_a_line_says_what_to_do(
    loss_fn: Callable[[nn.Module, twins.Batch], Any], info_log: pytest.LogCaptureFixture
) -> None:
    """In the log and in the first line of the report; numbers are those of the step that was taken."""
    model = Wrapped(keeps, layer=twins.layer(), latest=0.0)
    step = twins.compile_step(model, loss_fn, options=twins.EAGER)
    for seed in range(4):
        loss, latest = step(twins.chain_batch(seed)), model.latest
        expected, numbers = loss_fn(model, twins.chain_batch(seed))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
        assert step.outputs[1] == pytest.approx(numbers) and latest == pytest.approx(model.latest)
    assert "read `step.outputs` after the step" in info_log.text
    assert status(step) == str(report(step)).splitlines()[0]
    assert status(step).startswith("falls back: loop over micro-batches")


class Schedule:
    """Noise levels that go where the data are when they are first used, as those of diffusers do."""

    def __init__(self) -> None:
        self.levels = torch.linspace(0.1, 1.0, 8)

    def level(self, like: torch.Tensor) -> torch.Tensor:
        """Return a level."""
        self.levels = self.levels.to(device=like.device)
        return self.levels[2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_may_assign_a_tensor_to_where_it_was(count: int) -> None:
    """The step is a program all the same, which reads what is there in every step."""
    schedule = Schedule()
    levels = schedule.levels

    def loss_fn(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
        return twins.towers_loss(model, batch) * schedule.level(batch["x"])

    pair = twins.Twins(lambda: TwoTowers(depth=1), loss_fn, count=count)
    for seed in range(5):
        levels[2] = seed + 1
        pair.take(twins.towers_batch(seed))
        assert schedule.levels is levels
    assert pair.step.verdicts == ["plan"]


def test_an_rnn_is_a_loop_and_a_line_says_what_to_do(info_log: pytest.LogCaptureFixture) -> None:
    """And what it says makes the step a program with the same numbers."""

    def loss_fn(model: Any, x: Any) -> Any:
        return model(x)[0].square().mean()

    torch.manual_seed(0)
    model, x = nn.LSTM(6, 8, batch_first=True), torch.randn(4, 5, 6)
    step = twins.compile_step(model, loss_fn, options=twins.EAGER)
    step(x)
    flag = "torch._dynamo.config.allow_rnn = True"
    assert f"`{flag}` lets Dynamo trace it" in info_log.text
    with torch._dynamo.config.patch(allow_rnn=True):
        step = twins.compile_step(model, loss_fn, options=twins.EAGER)
        losses = [step(x) for _ in range(3)]
    assert twins.ran_as_program(step)
    torch.testing.assert_close(losses[-1], loss_fn(model, x).detach(), rtol=1e-4, atol=1e-5)
