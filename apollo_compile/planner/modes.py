"""Modes that a shortest schedule may need: CP-SAT gets no others.

    kept_modes(problem) -> per task, the modes that stay

These go, and a shortest schedule is kept: modes that no schedule can have (their demand exceeds a capacity, or their
consumption with the least of all others a budget) and modes that another one dominates (same lane, not longer, asks for
no more of anything that can run short).
Source: Sprecher, Hartmann, Drexl, "An exact algorithm for project scheduling with multiple modes", OR Spektrum 19,
1997, https://doi.org/10.1007/BF01545587
"""

from __future__ import annotations

from collections.abc import Sequence

from apollo_compile.planner.problem import Problem


def kept_modes(problem: Problem) -> list[list[int]]:
    """Return, per task, the modes that a shortest schedule may need; a task with none has no schedule."""
    kept = [list(range(len(task.modes))) for task in problem.tasks]
    while all(kept):
        scarce = scarce_budgets(problem, kept)
        possible = _possible_modes(problem, kept)
        smaller = [
            [mode for mode in modes if not _is_dominated(problem, task, mode, modes, scarce)]
            for task, modes in enumerate(possible)
        ]
        if smaller == kept:
            break
        kept = smaller
    return kept


def _possible_modes(problem: Problem, kept: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the modes that fit the capacities, and the budgets with some choice for all other tasks."""
    possible = [
        [
            mode
            for mode in modes
            if all(
                demand_of(problem, task, mode, resource) <= limit for resource, limit in enumerate(problem.capacities)
            )
        ]
        for task, modes in enumerate(kept)
    ]
    for resource, budget in enumerate(problem.budgets):
        least = [
            min(consumption_of(problem, task, mode, resource) for mode in modes) for task, modes in enumerate(kept)
        ]
        spare = budget - sum(least)
        possible = [
            [mode for mode in modes if consumption_of(problem, task, mode, resource) <= spare + least[task]]
            for task, modes in enumerate(possible)
        ]
    return possible


def scarce_budgets(problem: Problem, kept: Sequence[Sequence[int]]) -> list[int]:
    """Return the non-renewable resources of which some choice of modes consumes too much."""
    return [
        resource
        for resource, budget in enumerate(problem.budgets)
        if budget
        < sum(max(consumption_of(problem, task, mode, resource) for mode in modes) for task, modes in enumerate(kept))
    ]


def _is_dominated(problem: Problem, task: int, mode: int, others: Sequence[int], scarce: Sequence[int]) -> bool:
    """Return whether another mode is better, or as good and before it."""
    return any(
        is_as_good(problem, task, other, mode, scarce)
        and (other < mode or not is_as_good(problem, task, mode, other, scarce))
        for other in others
        if other != mode
    )


def is_as_good(problem: Problem, task: int, mode: int, other: int, scarce: Sequence[int]) -> bool:
    """Return whether the mode can take the place of the other one in every schedule."""
    own, replaced = problem.tasks[task].modes[mode], problem.tasks[task].modes[other]
    return (
        own.lane == replaced.lane
        and own.duration <= replaced.duration
        and all(
            demand_of(problem, task, mode, resource) <= demand_of(problem, task, other, resource)
            for resource in range(len(problem.capacities))
        )
        and all(
            consumption_of(problem, task, mode, resource) <= consumption_of(problem, task, other, resource)
            for resource in scarce
        )
    )


def demand_of(problem: Problem, task: int, mode: int, resource: int) -> int:
    """Return what a mode asks for of a renewable resource."""
    demands = problem.tasks[task].modes[mode].demands
    return demands[resource] if demands else 0


def consumption_of(problem: Problem, task: int, mode: int, resource: int) -> int:
    """Return what a mode takes of a budget."""
    consumption = problem.tasks[task].modes[mode].consumption
    return consumption[resource] if consumption else 0
