"""The planner's model and its bound on instances with published makespans: modes and renewable resources.

Most of these instances have non-renewable resources too, which the planner has not: here they are one more constraint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.cp_sat import Answer, search, search_with_restarts
from apollo_compile.planner.model import Model, build_model
from apollo_compile.planner.problem import Problem, Schedule
from apollo_compile.planner.replay import makespan_of
from tests.planner.instances import Budget, Instance, published

EXACT = ("PSPLIB j10.mm", "PSPLIB j20.mm", "PSPLIB j30.mm", "PSPLIB j30")
"""Families whose published makespan is reached; the others come within two percent."""

SHORTFALLS = {"J5058_5.mm": 29}
"""Makespans that are not good enough: with twice the work one worker still ends there, not at the published 28."""

SLOW = ("J5058_5.mm",)
"""Instances that take half a minute."""

INSTANCES = pytest.mark.parametrize("instance", published(), ids=lambda instance: instance.name)


def model_of(problem: Problem, budgets: Sequence[Budget]) -> Model:
    """Return the planner's model with budgets, for which it needs every mode: the slowest may be the thriftiest."""
    longest = sum(max(mode.duration for mode in task.modes) for task in problem.tasks)
    model = build_model(problem, [range(len(task.modes)) for task in problem.tasks], (0, longest))
    for budget in budgets:
        consumed = [
            amount * mode.on
            for modes, amounts in zip(model.task_modes, budget.consumption, strict=True)
            for mode, amount in zip(modes, amounts, strict=True)
        ]
        model.cp.add(sum(consumed) <= budget.limit)
    return model


def makespan(problem: Problem, budgets: Sequence[Budget], answer: Answer) -> int:
    """Return the makespan of what was found, which keeps every constraint."""
    found = makespan_of(problem, answer.starts, answer.modes)
    assert problem.violations(Schedule(modes=answer.modes, starts=answer.starts, makespan=found)) == ()
    for budget in budgets:
        assert sum(row[mode] for row, mode in zip(budget.consumption, answer.modes, strict=True)) <= budget.limit
    return found


@pytest.mark.parametrize(
    "instance",
    [pytest.param(each, marks=pytest.mark.soak) if each.name in SLOW else each for each in published()],
    ids=lambda instance: instance.name,
)
def test_the_published_makespan_is_reached(instance: Instance) -> None:
    """Without a start, with the work of a few seconds."""
    problem, budgets = instance.read()
    answer = search(model_of(problem, budgets), seed=1, deterministic_time=2.0, time_limit_s=600.0)
    assert not answer.reached_time_limit
    found = makespan(problem, budgets, answer)
    allowed = instance.best_makespan * (1.0 if instance.family in EXACT else 1.02)
    assert found <= SHORTFALLS.get(instance.name, allowed)
    if instance.is_proven:
        assert found >= instance.best_makespan
        assert answer.bound <= instance.best_makespan


@pytest.mark.soak
@pytest.mark.parametrize("name", SHORTFALLS)
def test_several_workers_reach_what_one_does_not(name: str) -> None:
    """In about ten seconds where nothing else runs; it ends as soon as it is sure."""
    (instance,) = (instance for instance in published() if instance.name == name)
    problem, budgets = instance.read()
    answer = search_with_restarts(
        model_of(problem, budgets), seed=1, deterministic_time=math.inf, time_limit_s=600.0, workers=2
    )
    assert (answer.status, makespan(problem, budgets, answer)) == ("optimal", instance.best_makespan)


@INSTANCES
def test_our_bound_is_below_the_published_makespan(instance: Instance) -> None:
    """And above nothing; without budgets it is lower still."""
    problem, _ = instance.read()
    assert 0 < lower_bound(problem) <= instance.best_makespan
