from __future__ import annotations

import random

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import Mode, Problem, Task
from apollo_compile.planner.simulate import Simulator
from tests.builders import random_problem
from tests.planner.oracle import find_optimum


@pytest.mark.parametrize(("num_tasks", "num_units"), [(5, 2), (4, 4)])
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_never_exceeds_the_optimum(num_tasks: int, num_units: int, seed: int) -> None:
    """Exhaustive search knows the truth."""
    problem = random_problem(random.Random(seed), num_tasks, num_units)
    assert lower_bound(problem) <= find_optimum(problem)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_at_least_the_critical_path(seed: int) -> None:
    """With the least durations."""
    problem = random_problem(random.Random(seed), 20, 4)
    simulator = Simulator(problem)
    shortest = [min(mode.duration for mode in task.modes) for task in problem.tasks]
    assert lower_bound(problem) >= max(tail + own for tail, own in zip(simulator.tails, shortest, strict=True))


@pytest.mark.parametrize("speedup", [1.3, 1.5, 1.8])
def test_the_bound_of_two_unequal_chains_mixes_path_and_load(speedup: float) -> None:
    """61 % and 39 % of the work: side by side until the short one ends, then on all units, is optimal.

    Neither the critical path (610) nor the area (500 x speedup) shows it; only their combination does.
    """
    tasks = []
    for start, total in ((0, 610), (61, 390)):
        for index in range(total // 10):
            modes = tuple(Mode(lane=lane, duration=10 if lane == 0 else round(10 * speedup)) for lane in range(3))
            tasks.append(Task(modes=modes, predecessors=(start + index - 1,) if index else ()))
    lanes = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
    best = 390 * speedup + 220
    assert 0.995 * best <= lower_bound(Problem(tasks=tuple(tasks), lanes=lanes, atom_sizes=(1, 1))) <= best


def test_the_bound_of_nothing_is_zero() -> None:
    """An empty problem takes no time."""
    assert lower_bound(Problem(tasks=(), lanes=(frozenset({0}),), atom_sizes=(1,))) == 0
