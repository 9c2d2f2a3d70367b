from __future__ import annotations

import random

import pytest

from apollo_compile.planner.greedy import greedy_schedules, lane_families, splits
from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import a_task, random_problem, realistic_problems
from tests.planner.oracle import ratios_to_optimum


@pytest.mark.parametrize(("num_tasks", "num_units"), [(5, 2), (4, 4)])
def test_the_best_list_schedule_is_near_the_optimum_of_small_problems(num_tasks: int, num_units: int) -> None:
    """Never below the optimum, at most 25 % above it, and within 5 % on average; the ratios are printed."""

    def best(problem: Problem, seed: int) -> int:
        return min(schedule.makespan for schedule in greedy_schedules(problem))

    ratios = ratios_to_optimum(num_tasks, num_units, best)
    assert min(ratios) >= 1 and max(ratios) <= 1.25
    assert sum(ratios) / len(ratios) <= 1.05


@pytest.mark.parametrize("seed", range(15))
def test_all_list_schedules_are_valid_and_distinct_and_the_serial_one_comes_first(seed: int) -> None:
    """On problems too large for the oracle, too."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(1, 40), rng.choice((2, 4)))
    schedules = greedy_schedules(problem)
    assert schedules[0] == serial_schedule(problem)
    assert len(set(schedules)) == len(schedules)
    for schedule in schedules:
        assert problem.violations(schedule) == ()


@pytest.mark.parametrize("name", ["clip 6 split", "imagebind 12 split", "microbatches 8 x 2+4"])
def test_list_schedules_of_real_models_beat_the_serial_schedule(name: str) -> None:
    """By the share that is known for these three, less a little."""
    schedules = greedy_schedules(realistic_problems()[name])
    share = {"clip 6 split": 0.85, "imagebind 12 split": 0.71, "microbatches 8 x 2+4": 0.91}[name]
    assert min(schedule.makespan for schedule in schedules) <= share * schedules[0].makespan


def test_a_family_of_lanes_is_a_split_and_all_units() -> None:
    """Halves, and three quarters beside a quarter; then also a half beside two quarters, thirds, and quarters.

    Lanes that leave units out are no split, nor are lanes that share some.
    """
    assert lane_families(random_problem(random.Random(0), 3, 4)) == [(0, 1, 2, 3, 4), (0, 1, 2), (0, 3, 4)]
    in_three, in_four = [(1, 4, 10), (2, 8, 9), (5, 6, 7)], [(4, 8, 9, 10)]
    assert splits(random_problem(random.Random(0), 3, 16)) == sorted([(1, 2), (3, 4), *in_three, *in_four])
    lanes = (frozenset({0, 1, 2}), frozenset({0}), frozenset({1, 2}), frozenset({0, 1}))
    for known, expected in ((lanes, [(1, 2)]), (lanes[:2], []), ((*lanes[:2], lanes[3]), [])):
        assert splits(Problem(tasks=(a_task(1),), lanes=known, atom_sizes=(1, 1, 1))) == expected


def test_without_lanes_there_is_only_the_serial_schedule() -> None:
    """Nothing keeps tasks apart there but resources, which list schedules do not look at."""
    bare = Problem(tasks=(a_task(1), a_task(2, before=(0,))))
    assert greedy_schedules(bare) == (serial_schedule(bare),)
