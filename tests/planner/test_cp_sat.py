"""CP-SAT against exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from apollo_compile.planner.cp_sat import SolverOutcome, solve_with_cp_sat
from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import a_task, limited, random_problem, seeds
from tests.planner.oracle import find_optimum


def ask_solver(problem: Problem, **changes: Any) -> SolverOutcome:
    """Return what CP-SAT finds with enough work for a small problem, and with one seed."""
    usual = {"hint": None, "lower_bound": 0, "seed": 0, "deterministic_time": 5.0, "time_limit_s": 60.0}
    return solve_with_cp_sat(problem, **{**usual, **changes})


@pytest.mark.parametrize("solver_seed", seeds(2, 3))
@pytest.mark.parametrize("seed", seeds(50, 200))
def test_the_solver_finds_what_exhaustive_search_finds(seed: int, solver_seed: int) -> None:
    """On random lanes and hand-overs, every other problem with demands and holds; with and without a hint."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(2, 7), rng.choice((2, 4)))
    problem = replace(problem, handover=rng.choice((0, 1, 3, 20, 60)))
    if seed % 2:
        problem = limited(rng, problem)
    serial = serial_schedule(problem)
    hint = serial if solver_seed and problem.is_valid(serial) else None
    outcome = ask_solver(problem, hint=hint, seed=solver_seed)
    assert outcome.status == "optimal" and problem.violations(outcome.schedule) == ()
    assert outcome.schedule.makespan == outcome.bound == find_optimum(problem)


def test_a_problem_without_a_schedule_is_infeasible() -> None:
    """One task needs more than there is."""
    outcome = ask_solver(Problem(tasks=(a_task(1, demands=(3,)),), capacities=(2,)))
    assert (outcome.status, outcome.schedule) == ("infeasible", None)


@pytest.mark.parametrize("time_limit_s", [0.0, -0.1])
def test_a_time_limit_that_strikes_is_reported(time_limit_s: float) -> None:
    """No time at all: nothing is found."""
    outcome = ask_solver(random_problem(random.Random(1), 12, 4), time_limit_s=time_limit_s)
    assert outcome.reached_time_limit and outcome.status == "unknown"
