"""Losses that return more than a loss: outputs of a step, whatever variant takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from tests.end_to_end.models import TwoTowers
from tests.end_to_end.step_cases.turns import compile_nothing, take_turns
from tests.end_to_end.twins import Batch, make_towers_twice, state_of, towers_batch

OPTIONS = {"runtime.bodies": "eager", "plan.replan": False, "plan.min_gain": 0.0, "plan.time_limit_s": 0.2}
NUM_STEPS = 12


class Outputs(NamedTuple):
    """A loss and scores."""

    loss: torch.Tensor
    scores: torch.Tensor


def _scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    scores: torch.Tensor = model(batch["x"], batch["y"])
    return scores


def a_tuple(model: nn.Module, batch: Batch) -> Any:
    """Return the loss, scores that are a view, a count and a number of Python's."""
    scores = _scores(model, batch)
    return scores.square().mean(), scores.t(), (scores > 0).sum(), scores.shape[0]


def a_named_tuple(model: nn.Module, batch: Batch) -> Outputs:
    """Return scores that the loss is computed from."""
    scores = _scores(model, batch)
    return Outputs(scores.square().mean(), scores)


def nested_metrics(model: nn.Module, batch: Batch) -> Any:
    """Return metrics in a dictionary, as lerobot's policies do."""
    scores = _scores(model, batch)
    return scores.square().mean(), {"accuracy": (scores > 0).float().mean(), "batch": batch["x"]}


def a_mapping(model: nn.Module, batch: Batch) -> Any:
    """Return the loss by name, behind a part of it that has a graph."""
    scores = _scores(model, batch)
    part = scores.square().mean()
    return {"part": part, "loss": part + scores.abs().mean(), "rows": scores.sum(-1)}


def the_loss_twice(model: nn.Module, batch: Batch) -> Any:
    """Return the loss under two names."""
    loss = _scores(model, batch).square().mean()
    return {"loss": loss, "again": loss}


def numbers(model: nn.Module, batch: Batch) -> Any:
    """Return numbers that are read of tensors, as lerobot's policies do; one is there twice, one is computed."""
    scores = _scores(model, batch)
    loss, largest = scores.square().mean(), scores.amax(keepdim=True).item()
    return loss, {"loss": loss.item(), "largest": largest, "again": [largest], "double": 2 * loss.detach().item() + 1}


LOSSES = (a_tuple, a_named_tuple, nested_metrics, a_mapping, the_loss_twice, numbers)


def _loss_in(returned: Any) -> torch.Tensor:
    loss: torch.Tensor = returned["loss"] if isinstance(returned, dict) else returned[0]
    return loss


def _combined(returned: Sequence[Any]) -> Any:
    """Return what is expected of equal micro-batches, written down a second time."""
    first = returned[0]
    if len(returned) == 1:
        return first.detach() if isinstance(first, torch.Tensor) else _rebuilt(first, returned)
    if isinstance(first, float):
        return sum(returned) / len(returned)
    if not isinstance(first, torch.Tensor):
        return _rebuilt(first, returned)
    stacked = torch.stack([each.detach() for each in returned])
    return stacked.mean(0) if first.dim() == 0 and first.is_floating_point() else stacked


def _rebuilt(first: Any, returned: Sequence[Any]) -> Any:
    if isinstance(first, dict):
        return {key: _combined([each[key] for each in returned]) for key in first}
    if isinstance(first, tuple | list):
        made = [_combined(each) for each in zip(*returned, strict=True)]
        return made if isinstance(first, list) else tuple(made)
    return first


@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda each: each.__name__)
def test_outputs_are_those_of_the_loop(
    loss_fn: Callable[[nn.Module, Batch], Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the program, of its segments in turn and of the traced step; none has a graph."""
    turns = take_turns(monkeypatch)
    compile_nothing(monkeypatch)
    (model, own), (eager, others) = make_towers_twice(partial(torch.optim.SGD, lr=0.01))
    step = compile_step(model, loss_fn, own, microbatches=count, options=OPTIONS)
    assert step.outputs is None
    kept = []
    for seed in range(NUM_STEPS):
        batch = towers_batch(seed)
        loss = step(batch)
        others.zero_grad()
        returned = [loss_fn(eager, part) for part in split_evenly(batch, count)]
        for each in returned:
            (_loss_in(each) / count).backward()
        others.step()
        expected = _combined(returned)
        kept.append((step.outputs, expected))
        torch.testing.assert_close(loss, _loss_in(expected), rtol=1e-4, atol=1e-5)
        assert type(step.outputs) is type(returned[0])
    for outputs, expected in kept:  # no later step writes to those of an earlier one
        torch.testing.assert_close(_plain(outputs), _plain(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state_of(model), state_of(eager), rtol=1e-4, atol=1e-5)
    (tuner,) = step.tuners
    assert turns.has_left_the_loop and not turns.missing(tuner)


def _plain(outputs: Any) -> Any:
    """Return outputs with containers of Python's own classes."""
    if isinstance(outputs, dict):
        return {key: _plain(each) for key, each in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(map(_plain, outputs))
    assert not (isinstance(outputs, torch.Tensor) and outputs.requires_grad)
    return outputs


def test_a_tensor_that_is_kept_may_be_read_by_the_next_micro_batch() -> None:
    """Then a step is a loop, since no program could pass it on in time."""
    before = {"loss": torch.zeros(())}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = _scores(model, batch).square().mean() + before["loss"]
        before["loss"] = loss.detach()
        return loss

    model = TwoTowers(depth=1)
    eager = copy.deepcopy(model)
    step = compile_step(model, loss_fn, microbatches=2, options={**OPTIONS, "plan.autotune": False})
    found = [step(towers_batch(seed)) for seed in range(6)]
    before["loss"] = torch.zeros(())
    with torch.no_grad():
        expected = [
            torch.stack([loss_fn(eager, part) for part in split_evenly(towers_batch(seed), 2)]).mean()
            for seed in range(6)
        ]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_outputs_that_differ_by_micro_batch_are_lists() -> None:
    """Others are combined still; a step that fails has no outputs."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        scores = _scores(model, batch)
        return scores.square().mean(), {"scores": scores, "size": len(scores), "mean": scores.mean(), "number": 0.5}

    split = lambda batch, count: [{name: each[:3] for name, each in batch.items()}, batch]  # noqa: E731
    step = compile_step(TwoTowers(depth=1), loss_fn, microbatches=2, split=split, options=OPTIONS)
    assert step(towers_batch(0)).isfinite()
    _, outputs = step.outputs
    assert [len(each) for each in outputs["scores"]] == outputs["size"] == [3, 8]
    assert outputs["mean"].shape == () and outputs["number"] == 0.5
    with pytest.raises(KeyError):
        step({})
    assert step.outputs is None


def test_outputs_do_not_follow_parameters_or_batches() -> None:
    """A parameter and a part of the batch that are returned have the values that they had in the loss function."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        return _scores(model, batch).square().mean(), next(model.parameters()), batch["x"]

    model = TwoTowers(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = compile_step(model, loss_fn, optimizer, options={**OPTIONS, "plan.autotune": False})
    for seed in range(5):
        before, batch = next(model.parameters()).detach().clone(), towers_batch(seed)
        kept = batch["x"].clone()
        step(batch)
        batch["x"].zero_()
        _, parameter, given = step.outputs
        assert torch.equal(parameter, before) and torch.equal(given, kept)


class LogsItself(nn.Module):
    """A model whose forward keeps a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = TwoTowers(depth=1)
        self.latest = 0.0

    def forward(self, batch: Batch) -> Any:
        loss = self.towers(batch["x"], batch["y"]).square().mean()
        self.latest = loss.item()
        return loss, {"loss": self.latest}


def _prints(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch)[0]
    print("a step")
    return loss


@pytest.mark.parametrize("loss_fn", (lambda model, batch: model(batch), _prints), ids=("keeps", "prints"))
def test_a_loss_function_that_logs_is_a_loop_and_a_line_says_what_to_do(
    loss_fn: Callable[[nn.Module, Batch], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers are those of the step that was taken."""
    model = LogsItself()
    step = compile_step(model, loss_fn, options={**OPTIONS, "plan.autotune": False})
    with caplog.at_level("INFO", "apollo_compile"):
        for seed in range(5):
            loss = step(towers_batch(seed))
            assert model.latest == pytest.approx(float(loss))
    assert "read `step.outputs` after the step" in caplog.text
    outputs = step.outputs
    assert outputs is not None and (
        isinstance(outputs, torch.Tensor) or outputs[1]["loss"] == pytest.approx(float(loss))
    )


def test_whole_numbers_that_are_read_are_those_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """Which is a loop, and a line says what to do."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        scores = _scores(model, batch)
        return scores.square().mean(), {"positive": (scores > 0).sum().item()}

    model = TwoTowers(depth=1)
    step = compile_step(model, loss_fn, options={**OPTIONS, "plan.autotune": False})
    with caplog.at_level("INFO", "apollo_compile"):
        for seed in range(3):
            batch = towers_batch(seed)
            loss = step(batch)
            expected = loss_fn(model, batch)
            torch.testing.assert_close(loss, expected[0].detach(), rtol=1e-4, atol=1e-5)
            assert step.outputs[1] == expected[1]
    assert "read `step.outputs` after the step" in caplog.text


class Schedule:
    """Noise levels that go where the data are when they are first used, as those of diffusers do."""

    def __init__(self) -> None:
        self.levels = torch.linspace(0.1, 1.0, 8)

    def level(self, like: torch.Tensor) -> torch.Tensor:
        """Return a level."""
        self.levels = self.levels.to(device=like.device)
        return self.levels[2]


@pytest.mark.parametrize("count", (1, 2))
def test_a_model_may_assign_a_tensor_to_where_it_was(count: int) -> None:
    """The step is a program all the same, which reads what is there in every step."""
    schedule, model = Schedule(), TwoTowers(depth=1)

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return _scores(model, batch).square().mean() * schedule.level(batch["x"])

    levels = schedule.levels
    step = compile_step(model, loss_fn, microbatches=count, options={**OPTIONS, "plan.autotune": False})
    for seed in range(5):
        batch = towers_batch(seed)
        levels[2] = seed + 1
        loss = step(batch)
        assert schedule.levels is levels
        parts = [_scores(model, part).square().mean() for part in split_evenly(batch, count)]
        expected = torch.stack(parts).mean() * (seed + 1)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    assert step.verdicts == ["plan"]
