"""Losses that return more than a loss: outputs of a step, whatever variant takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from apollo_compile.session.step.returned import Outputs as Combined
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from tests.end_to_end.models import TwoTowers
from tests.end_to_end.step_cases.turns import compile_nothing, take_turns
from tests.end_to_end.twins import EAGER, Batch, make_towers_twice, state_of, towers_batch

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


def a_mapping(model: nn.Module, batch: Batch) -> Any:
    """Return the loss under two names, behind a part of it that has a graph, and metrics in a dictionary."""
    scores = _scores(model, batch)
    part = scores.square().mean()
    loss, metrics = part + scores.abs().mean(), {"accuracy": (scores > 0).float().mean(), "batch": batch["x"]}
    return {"part": part, "loss": loss, "again": loss, "rows": scores.sum(-1), "metrics": metrics}


def numbers(model: nn.Module, batch: Batch) -> Any:
    """Return numbers that are read of tensors, as lerobot's policies do; one is there twice, one is computed."""
    scores = _scores(model, batch)
    loss, largest = scores.square().mean(), scores.amax(keepdim=True).item()
    return loss, {"loss": loss.item(), "largest": largest, "again": [largest], "double": 2 * loss.detach().item() + 1}


LOSSES = (a_tuple, a_named_tuple, a_mapping, numbers)


def _loss_in(returned: Any) -> torch.Tensor:
    loss: torch.Tensor = returned["loss"] if isinstance(returned, dict) else returned[0]
    return loss


@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda each: each.__name__)
def test_outputs_are_those_of_the_loop(
    loss_fn: Callable[[nn.Module, Batch], Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the program, of its segments in turn and of the traced step; none has a graph."""
    turns = take_turns(monkeypatch)
    compile_nothing(monkeypatch)
    (model, own), (eager, others) = make_towers_twice(partial(torch.optim.SGD, lr=0.01))
    step = compile_step(model, loss_fn, own, microbatches=count, options={**EAGER, "plan.autotune": True})
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
        alone = [tree_map_only(torch.Tensor, torch.Tensor.detach, each) for each in returned]
        expected = Combined(alone, [1 / count] * count).combined
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


@pytest.mark.parametrize("bad", [{}, None], ids=["loss", "split"])
def test_outputs_that_differ_by_micro_batch_are_lists(bad: Any) -> None:
    """Others are combined still; a step that fails has no outputs."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        scores = _scores(model, batch)
        return scores.square().mean(), {"scores": scores, "size": len(scores), "mean": scores.mean(), "number": 0.5}

    split = lambda batch, count: [{name: each[:3] for name, each in batch.items()}, batch]  # noqa: E731
    step = compile_step(TwoTowers(depth=1), loss_fn, microbatches=2, split=split, options=EAGER)
    assert step(towers_batch(0)).isfinite()
    _, outputs = step.outputs
    assert [len(each) for each in outputs["scores"]] == outputs["size"] == [3, 8]
    assert outputs["mean"].shape == () and outputs["number"] == 0.5
    with pytest.raises((KeyError, AttributeError)):
        step(bad)
    assert step.outputs is None


def test_outputs_do_not_follow_parameters_or_batches() -> None:
    """A parameter and a part of the batch that are returned have the values that they had in the loss function."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        return _scores(model, batch).square().mean(), next(model.parameters()), batch["x"]

    model = TwoTowers(depth=1)
    step = compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1e-4), options=EAGER)
    for seed in range(5):
        before, batch = next(model.parameters()).detach().clone(), towers_batch(seed)
        kept = batch["x"].clone()
        step(batch)
        batch["x"].zero_()
        _, parameter, given = step.outputs
        assert torch.equal(parameter, before) and torch.equal(given, kept)
