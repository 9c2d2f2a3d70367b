from __future__ import annotations

import random

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedule
from apollo_compile.planner.problem import Mode, Problem, Task
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import random_problem
from tests.planner.oracle import find_optimum


@pytest.mark.parametrize(("num_tasks", "num_units"), [(5, 2), (4, 4)])
def test_greedy_is_near_the_optimum_of_small_problems(num_tasks: int, num_units: int) -> None:
    """Never below the optimum, at most 12 % above it, and within 1 % on average; the ratios are printed."""
    ratios = []
    for seed in range(25):
        problem = random_problem(random.Random(seed), num_tasks, num_units)
        schedule, optimum = greedy_schedule(problem, iterations=300), find_optimum(problem)
        assert problem.violations(schedule) == ()
        ratios.append(schedule.makespan / optimum)
    print(f"greedy / optimum: mean {sum(ratios) / len(ratios):.4f}, max {max(ratios):.4f}")
    assert min(ratios) >= 1
    assert max(ratios) <= 1.12
    assert sum(ratios) / len(ratios) <= 1.01


@pytest.mark.parametrize("seed", range(15))
def test_a_greedy_schedule_is_valid_and_not_longer_than_serial(seed: int) -> None:
    """On problems too large for the oracle, too."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(1, 40), rng.choice((2, 4)))
    schedule = greedy_schedule(problem, seed=seed, iterations=100)
    assert problem.violations(schedule) == ()
    assert lower_bound(problem) <= schedule.makespan <= serial_schedule(problem).makespan


def test_the_same_seed_gives_the_same_schedule() -> None:
    """The only randomness is seeded."""
    problem = random_problem(random.Random(3), 30, 4)
    assert greedy_schedule(problem, seed=5, iterations=200) == greedy_schedule(problem, seed=5, iterations=200)


def unequal_chains(speedup: float, num_layers: int, handover: int) -> Problem:
    """Return a first task, chains with 61 % and 39 % of the work, and a last task, on two units."""
    tasks = []

    def add(work: float, predecessors: tuple[int, ...]) -> tuple[int, ...]:
        modes = tuple(Mode(lane=lane, duration=round(work * (speedup if lane else 1))) for lane in range(3))
        tasks.append(Task(modes=modes, predecessors=predecessors))
        return (len(tasks) - 1,)

    first = add(10_000, ())
    ends: tuple[int, ...] = ()
    for work in (610_000, 390_000):
        last = first
        for _ in range(num_layers):
            last = add(work / num_layers, last)
        ends += last
    add(10_000, ends)
    lanes = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
    return Problem(tasks=tuple(tasks), lanes=lanes, atom_sizes=(1, 1), handover=handover)


@pytest.mark.parametrize("speedup", [1.3, 1.5, 1.8])
@pytest.mark.parametrize("num_layers", [12, 100])
def test_unequal_chains_run_side_by_side_and_then_wide(speedup: float, num_layers: int) -> None:
    """The plan is within a layer, and the hand-overs at its seams, of the fluid optimum."""
    problem = unequal_chains(speedup, num_layers, handover=1000)
    schedule = greedy_schedule(problem)
    fluid = 20_000 + 390_000 * speedup + 220_000
    assert problem.violations(schedule) == ()
    assert schedule.makespan <= fluid + 610_000 / num_layers * speedup + 6000
    assert schedule.lanes[0] == schedule.lanes[-1] == 0
    assert {1, 2} <= set(schedule.lanes)
