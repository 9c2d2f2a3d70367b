"""Windows against the schedules in which they begin."""

from __future__ import annotations

import random

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.simulate import serial_schedule
from apollo_compile.planner.windows import improve_windows
from tests.builders import limited, random_problem, realistic_problems, seeds
from tests.planner.oracle import find_optimum


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_windows_shorten_a_schedule_and_never_lengthen_it(seed: int) -> None:
    """From the serial schedule of realistic graphs."""
    for name, problem in realistic_problems().items():
        if len(problem.tasks) > 60:
            continue
        start = serial_schedule(problem)
        outcome = improve_windows(
            problem, start, lower_bound=lower_bound(problem), seed=seed, deterministic_time=0.05, time_limit_s=60.0
        )
        assert outcome.schedule is not None, name
        assert problem.violations(outcome.schedule) == ()
        assert outcome.schedule.makespan <= start.makespan


@pytest.mark.parametrize("seed", range(20))
def test_windows_keep_demands_and_holds(seed: int) -> None:
    """Where the serial schedule just fits, what windows find fits as well and is not longer."""
    rng = random.Random(seed)
    problem = limited(rng, random_problem(rng, 30, rng.choice((2, 4))))
    start = serial_schedule(problem)
    outcome = improve_windows(problem, start, lower_bound=0, seed=seed, deterministic_time=0.05, time_limit_s=60.0)
    assert outcome.status == "feasible"
    assert outcome.schedule is not None
    assert problem.violations(outcome.schedule) == ()
    assert outcome.schedule.makespan <= start.makespan


def test_windows_cover_small_problems() -> None:
    """A problem of one window ends as short as exhaustive search finds, up to the smallest step that is asked for."""
    for seed in range(20):
        problem = random_problem(random.Random(seed), 5, 2)
        optimum = find_optimum(problem)
        assert optimum is not None
        outcome = improve_windows(
            problem, serial_schedule(problem), lower_bound=optimum, seed=0, deterministic_time=9.0, time_limit_s=60.0
        )
        assert outcome.schedule is not None
        assert outcome.status == "optimal"
        assert outcome.schedule.makespan == optimum
