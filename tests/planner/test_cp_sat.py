"""CP-SAT against exhaustive search."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.planner.cp_sat import solve_with_cp_sat
from apollo_compile.planner.problem import Mode, Problem, Schedule, Task
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import limited, random_problem, seeds
from tests.planner.oracle import find_optimum


@pytest.mark.parametrize("solver_seed", seeds(2, 3))
@pytest.mark.parametrize("seed", seeds(30, 60))
def test_the_solver_finds_what_exhaustive_search_finds(seed: int, solver_seed: int) -> None:
    """On random lanes and hand-overs, every other problem with demands and holds; with and without a hint."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(2, 6), rng.choice((2, 4)))
    if seed % 2:
        problem = limited(rng, problem)
    serial = serial_schedule(problem)
    hint = serial if solver_seed and problem.is_valid(serial) else None
    outcome = solve_with_cp_sat(
        problem, hint=hint, lower_bound=0, seed=solver_seed, deterministic_time=5.0, time_limit_s=60.0
    )
    optimum = find_optimum(problem)
    if optimum is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.schedule is not None
    assert problem.violations(outcome.schedule) == ()
    assert outcome.schedule.makespan == outcome.bound == optimum


def test_the_same_seed_gives_the_same_schedule() -> None:
    """With one worker and a limit that counts work."""
    problem = random_problem(random.Random(3), 14, 4)
    outcomes = [
        solve_with_cp_sat(problem, hint=None, lower_bound=0, seed=5, deterministic_time=0.2, time_limit_s=60.0)
        for _ in range(2)
    ]
    assert outcomes[0] == outcomes[1]
    assert not outcomes[0].reached_time_limit


def test_a_problem_without_a_schedule_is_infeasible() -> None:
    """One task needs more than there is."""
    problem = Problem(tasks=(Task(modes=(Mode(duration=1, demands=(3,)),), predecessors=()),), capacities=(2,))
    outcome = solve_with_cp_sat(problem, hint=None, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=10.0)
    assert (outcome.status, outcome.schedule) == ("infeasible", None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(20, 200))
def test_the_solver_finds_the_optimum_across_hand_overs(seed: int) -> None:
    """Hand-over always costs something; three solver seeds each."""
    rng = random.Random(10_000 + seed)
    problem = random_problem(rng, rng.randrange(3, 7), rng.choice((2, 4)))
    problem = replace(problem, handover=rng.choice((1, 3, 20, 60)))
    if seed % 4 == 3:
        problem = limited(rng, problem)
    optimum = find_optimum(problem)
    for solver_seed in range(3):
        outcome = solve_with_cp_sat(
            problem, hint=None, lower_bound=0, seed=solver_seed, deterministic_time=5.0, time_limit_s=60.0
        )
        if optimum is None:
            assert outcome.status == "infeasible"
        else:
            assert outcome.status == "optimal"
            assert outcome.schedule is not None
            assert problem.violations(outcome.schedule) == ()
            assert outcome.schedule.makespan == outcome.bound == optimum


def test_a_start_that_is_not_valid_or_beats_the_bound_is_refused() -> None:
    """Both are errors of the caller."""
    problem = random_problem(random.Random(0), 4)
    serial = serial_schedule(problem)
    for start, bound in ((replace(serial, makespan=serial.makespan + 1), 0), (serial, serial.makespan + 1)):
        with pytest.raises(InvariantError):
            solve_with_cp_sat(problem, hint=start, lower_bound=bound, seed=0, deterministic_time=1.0, time_limit_s=9.0)


@pytest.mark.soak
def test_two_processes_find_the_same_schedules() -> None:
    """Neither the hash seed nor the process matters."""
    script = """
import random
from apollo_compile.planner.cp_sat import solve_with_cp_sat
from tests.builders import random_problem
effort = dict(lower_bound=0, seed=3, deterministic_time=0.1, time_limit_s=60.0)
problem = random_problem(random.Random(3), 16, 4)
print(solve_with_cp_sat(problem, hint=None, **effort))
"""
    root = Path(__file__).parents[2]
    results = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=root, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2")
    ]
    assert results[0].returncode == 0, results[0].stderr
    assert results[0].stdout == results[1].stdout


@pytest.mark.parametrize("time_limit_s", [0.0, -0.1])
def test_a_time_limit_that_strikes_is_reported(time_limit_s: float) -> None:
    """No time at all: nothing is found."""
    problem = random_problem(random.Random(1), 12, 4)
    whole = solve_with_cp_sat(
        problem, hint=None, lower_bound=0, seed=0, deterministic_time=9.0, time_limit_s=time_limit_s
    )
    assert whole.reached_time_limit and whole.status == "unknown"


def test_nothing_takes_no_time() -> None:
    """A problem without tasks."""
    outcome = solve_with_cp_sat(
        Problem(tasks=()), hint=None, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=9.0
    )
    assert outcome.status == "optimal"
    assert outcome.schedule == Schedule(modes=(), starts=(), makespan=0)
