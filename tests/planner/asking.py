"""CP-SAT with the arguments that most tests give it."""

from __future__ import annotations

from typing import Any

from apollo_compile.planner.cp_sat import SolverOutcome, solve_with_cp_sat
from apollo_compile.planner.problem import Problem


def ask_solver(problem: Problem, **changes: Any) -> SolverOutcome:
    """Return what CP-SAT finds with enough work for a small problem, and with one seed."""
    usual = {"hint": None, "lower_bound": 0, "seed": 0, "deterministic_time": 5.0, "time_limit_s": 60.0}
    return solve_with_cp_sat(problem, **{**usual, **changes})
