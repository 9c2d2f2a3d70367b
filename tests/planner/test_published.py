"""The planner's model and its bound on instances with published makespans: modes and renewable resources.

Most of these instances have non-renewable resources too, which the planner has not: here they are one more constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.cp_sat import search
from apollo_compile.planner.model import Model, build_model
from apollo_compile.planner.problem import Problem
from tests.planner.instances import Budget, Instance, published

EXACT = ("PSPLIB j10.mm", "PSPLIB j20.mm", "PSPLIB j30.mm", "PSPLIB j30")
"""Families whose published makespan is reached; the others come within two percent."""

SHORTFALLS = {"J5058_5.mm": 29}
"""Makespans that are not good enough: with twice the work one worker still ends there, not at the published 28."""

SLOW = ("J5058_5.mm",)
"""Instances that take half a minute."""


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
    assert answer.schedule is not None and problem.violations(answer.schedule) == ()
    for budget in budgets:
        pairs = zip(budget.consumption, answer.schedule.modes, strict=True)
        assert sum(row[mode] for row, mode in pairs) <= budget.limit
    found, allowed = answer.schedule.makespan, instance.best_makespan * (1.0 if instance.family in EXACT else 1.02)
    assert found <= SHORTFALLS.get(instance.name, allowed)
    if instance.is_proven:
        assert found >= instance.best_makespan
        assert answer.bound <= instance.best_makespan


@pytest.mark.parametrize("instance", published(), ids=lambda instance: instance.name)
def test_our_bound_is_below_the_published_makespan(instance: Instance) -> None:
    """And above nothing; without budgets it is lower still."""
    problem, _ = instance.read()
    assert 0 < lower_bound(problem) <= instance.best_makespan
