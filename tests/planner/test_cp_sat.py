"""CP-SAT against exhaustive search, and the models that showed which encoding is sound."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.cp_sat import improve_windows, solve_with_cp_sat
from apollo_compile.planner.problem import Mode, Problem, Task
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import limited, random_problem, realistic_problems
from tests.planner.oracle import find_optimum

MODELS = Path(__file__).parent / "cpsat_repro"


@pytest.mark.parametrize("solver_seed", [0, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_the_solver_finds_what_exhaustive_search_finds(seed: int, solver_seed: int) -> None:
    """On random lanes and hand-overs, every other problem with demands, holds and a budget; with and without a hint."""
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


@pytest.mark.parametrize("seed", range(3))
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


def test_a_problem_without_a_schedule_is_infeasible() -> None:
    """One task needs more than there is; or the budget is spent by any choice."""
    demanding = Problem(tasks=(Task(modes=(Mode(duration=1, demands=(3,)),), predecessors=()),), capacities=(2,))
    costly = Problem(tasks=(Task(modes=(Mode(duration=1, consumption=(3,)),), predecessors=()),), budgets=(2,))
    for problem in (demanding, costly):
        outcome = solve_with_cp_sat(
            problem, hint=None, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=10.0
        )
        assert (outcome.status, outcome.schedule) == ("infeasible", None)


@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in MODELS.glob("*.separate.pbtxt")))
def test_alternatives_with_starts_of_their_own_have_the_shorter_optimum(name: str) -> None:
    """Two models of one problem; sharing starts among alternatives made the solver miss schedules that exist.

    A solver without that defect finds the same optimum in both; none may find a shorter one in the shared model.
    """
    values = {}
    for encoding in ("separate", "shared"):
        model = cp_model.CpModel()
        assert model.proto.parse_text_format((MODELS / f"{name}.{encoding}.pbtxt").read_text())
        best = []
        for seed in range(4):
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = 1
            solver.parameters.random_seed = seed
            status = solver.solve(model)
            assert encoding == "shared" or status == cp_model.OPTIMAL
            if status == cp_model.OPTIMAL:
                best.append(round(solver.objective_value))
        values[encoding] = best
    assert len(set(values["separate"])) == 1
    assert all(value >= values["separate"][0] for value in values["shared"])
