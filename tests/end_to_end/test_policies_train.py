"""Policies of robots and learners of reinforcement learning train with `compile_step` as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.step import compile_step
from benchmarks.workloads import build
from benchmarks.workloads.learners import LEARNERS, Batch, MakeStep, Update, build_learner, make_loop
from tests.end_to_end.twins import ran_as_program

pytestmark = pytest.mark.slow
_SOAK = [pytest.mark.soak]

POLICIES = ("act", "diffusion_policy", "vla")
NUM_STEPS = 10

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "plan": {"plan.autotune": False, "plan.replan": False, "plan.min_gain": 0.0},  # the program from the second step on
}
UNCOMPILED = {"runtime.bodies": "eager", "plan.planner": "greedy", "plan.time_limit_s": 0.1}
"""Bodies and plans that take no time."""

ALWAYS = ("sac", "vla")
"""With default options in every run; all others with the plan alone."""


def _parametrize(names: Sequence[str]) -> pytest.MarkDecorator:
    """Run a test for every workload, options and kind of bodies."""
    cases = []
    for name, (title, options) in itertools.product(names, OPTIONS.items()):
        is_always = title == "plan" or name in ALWAYS
        cases += [
            pytest.param(name, {**options, **UNCOMPILED}, id=f"{name}-{title}", marks=[] if is_always else _SOAK),
            pytest.param(name, options, id=f"{name}-{title}-native", marks=_SOAK),
        ]
    return pytest.mark.parametrize(("name", "options"), cases)


Trained = tuple[list[float], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]
"""Losses, parameters and buffers, and the state of every optimizer."""


def _rolled(batch: Batch, step: int) -> Batch:
    """Return the batch of a step, whose rows are in another order than those of the step before."""
    return {name: value.roll(step, 0) for name, value in batch.items()}


def _states(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, torch.Tensor]]:
    return [
        {
            f"{number}.{name}": value
            for number, state in each.state_dict()["state"].items()
            for name, value in state.items()
        }
        for each in optimizers
    ]


def _train_policy(name: str, make_step: MakeStep) -> tuple[Trained, list[Any]]:
    workload = build(name, "tiny")

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return workload.loss(model(**batch))

    trained = [each for each in workload.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
    step = make_step(workload.model, loss_fn, optimizer)
    losses = [step(_rolled(workload.inputs, number)).item() for number in range(NUM_STEPS)]
    return (losses, workload.model.state_dict(), _states([optimizer])), [step]


def _train_learner(name: str, make_step: MakeStep) -> tuple[Trained, list[Any]]:
    learner = build_learner(name)
    update = Update(learner, make_step)
    losses = [loss.item() for number in range(NUM_STEPS) for loss in update(_rolled(learner.batch, number)).values()]
    return (losses, learner.model.state_dict(), _states(update.optimizers)), update.steps


def _assert_same(expected: Trained, actual: Trained) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip([actual[1], *actual[2]], [expected[1], *expected[2]], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            atol = max(1e-7, 1e-4 * float(value.abs().max()))
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=atol, msg=lambda t, n=name: f"{n}: {t}")


@_parametrize((*POLICIES, *LEARNERS))
def test_a_policy_or_learner_trains_as_in_eager(name: str, options: Mapping[str, Any]) -> None:
    """Losses of all phases, parameters, targets and the state of every optimizer, on batches that are not alike.

    Plans ran if they were forced.
    """
    train = _train_policy if name in POLICIES else _train_learner
    expected, _ = train(name, make_loop)
    actual, steps = train(name, partial(compile_step, options=options))
    _assert_same(expected, actual)
    for step in steps if "plan.autotune" in options else ():
        assert ran_as_program(step), step.verdicts


@pytest.mark.parametrize("name", LEARNERS)
def test_an_update_trains_all_networks_and_moves_targets(name: str) -> None:
    """A phase trains its own networks only, and is left out where it is not its turn."""
    learner = build_learner(name)
    update = Update(learner, make_loop)
    for phase, step in zip(update.phases, update.steps, strict=True):
        before = {key: value.clone() for key, value in learner.model.state_dict().items()}
        step(learner.batch)
        changed = {key for key, value in learner.model.named_parameters() if not torch.equal(value, before[key])}
        assert changed and {key.split(".")[0] for key in changed} == {phase.trained}
    taken = [set(update(learner.batch)) for _ in range(3)]
    every = {phase.name for phase in update.phases if phase.every == 1}
    assert taken[0] == taken[2] == {phase.name for phase in update.phases}
    assert taken[1] == every
    first = list(build_learner(name).model.get_submodule(learner.targets[0]).parameters())
    for now, then, followed in zip(update.targets, first, update.followed, strict=True):
        assert not torch.equal(now, then) and not torch.equal(now, followed)
