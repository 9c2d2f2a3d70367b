"""Modes that a shortest schedule may need; CP-SAT gets no others.

    kept_modes(problem) -> per task, the modes that are kept

Dropped are modes whose demand exceeds a capacity, and modes that another mode dominates (same lane, not longer, no
larger demand of any resource). Some shortest schedule always remains.
Source: Sprecher, Hartmann, Drexl, "An exact algorithm for project scheduling with multiple modes", OR Spektrum 19,
1997, https://doi.org/10.1007/BF01545587
"""

from __future__ import annotations

from collections.abc import Sequence

from apollo_compile.planner.problem import Problem


def kept_modes(problem: Problem) -> list[list[int]]:
    """Return, per task, the modes that a shortest schedule may need; if a task has none, there is no schedule."""
    kept: list[list[int]] = []
    for task in range(len(problem.tasks)):
        possible = [mode for mode in range(len(problem.tasks[task].modes)) if _fits(problem, task, mode)]
        kept.append([mode for mode in possible if not _is_dominated(problem, task, mode, possible)])
    return kept


def _fits(problem: Problem, task: int, mode: int) -> bool:
    return all(
        demand_of(problem, task, mode, resource) <= capacity for resource, capacity in enumerate(problem.capacities)
    )


def _is_dominated(problem: Problem, task: int, mode: int, others: Sequence[int]) -> bool:
    """Return whether another mode is better, or is as good and has a smaller index."""
    return any(
        is_as_good(problem, task, other, mode) and (other < mode or not is_as_good(problem, task, mode, other))
        for other in others
        if other != mode
    )


def is_as_good(problem: Problem, task: int, mode: int, other: int) -> bool:
    """Return whether the mode can replace the other one in every schedule without making it longer."""
    own, replaced = problem.tasks[task].modes[mode], problem.tasks[task].modes[other]
    return (
        own.lane == replaced.lane
        and own.duration <= replaced.duration
        and all(
            demand_of(problem, task, mode, resource) <= demand_of(problem, task, other, resource)
            for resource in range(len(problem.capacities))
        )
    )


def demand_of(problem: Problem, task: int, mode: int, resource: int) -> int:
    """Return the demand of a mode for a renewable resource."""
    demands = problem.tasks[task].modes[mode].demands
    return demands[resource] if demands else 0
