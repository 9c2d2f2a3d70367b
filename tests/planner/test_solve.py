from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner import cp_sat
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedules
from apollo_compile.planner.problem import Problem, TaskSchedule
from apollo_compile.planner.simulate import Simulator, execute, serial_schedule
from apollo_compile.planner.solve import Effort, Solution, solve
from tests.builders import interfering, limited, random_problem, realistic_problems, seeds
from tests.planner.oracle import SMALL, find_optimum

QUICK = Effort(work_s=0.4, time_limit_s=60.0)
"""Little work, and a limit that no machine reaches: the same everywhere."""


def solved(problem: Problem, effort: Effort = QUICK) -> Solution:
    """Solve a problem, and check what every solution keeps."""
    solution = solve(problem, effort)
    assert problem.violations(solution.schedule) == ()
    assert solution.execution == execute(problem, solution.schedule)
    assert solution.bound == lower_bound(problem) <= solution.schedule.makespan <= solution.execution.makespan
    assert solution.execution.makespan == min(candidate.executed for candidate in solution.candidates)
    chosen = solution.candidates[solution.chosen]
    assert (chosen.makespan, chosen.executed) == (solution.schedule.makespan, solution.execution.makespan)
    assert (solution.proof == "bound") == (solution.schedule.makespan == solution.bound)
    return solution


@pytest.mark.slow
@pytest.mark.parametrize("solver_seed", seeds(1, 3))
@pytest.mark.parametrize("seed", seeds(60, 200))
def test_the_solution_of_a_small_problem_is_optimal(seed: int, solver_seed: int) -> None:
    """With the work of the default effort: exhaustive search finds nothing shorter, and no bound is above."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(1, 8), rng.choice((2, 4)))
    solution = solved(problem, replace(QUICK, work_s=2.0, seed=solver_seed))
    assert find_optimum(problem, below=solution.schedule.makespan) is None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", SMALL)
def test_the_solution_of_a_tiny_problem_is_optimal(kind: str, seed: int) -> None:
    """Or there is none, where some task asks for more than there is in every mode."""
    problem = SMALL[kind](random.Random(1000 + seed))
    optimum = find_optimum(problem)
    if optimum is None:
        with pytest.raises(InfeasiblePlanError, match="keeps the capacities"):
            solve(problem, QUICK)
        return
    solution = solved(problem, replace(QUICK, seed=seed))
    assert solution.schedule.makespan == optimum
    assert solution.proof is not None or kind != "two or four units"  # so few tasks are proven with this little work


@pytest.mark.parametrize("use_solver", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_solution_is_never_longer_than_serial_with_interference(seed: int, use_solver: bool) -> None:
    """Serial is a candidate, the first one."""
    rng = random.Random(seed)
    problem = interfering(random_problem(rng, rng.randrange(2, 30), rng.choice((2, 4))), rng.choice((1.3, 3.0)))
    solution = solved(problem, replace(QUICK, use_solver=use_solver))
    assert solution.candidates[0].name == "serial"
    assert solution.execution.makespan <= serial_schedule(problem).makespan
    assert (solution.solver is None) or use_solver


@pytest.mark.parametrize("seed", range(25))
def test_the_chosen_order_is_nearly_the_best_with_interference(seed: int) -> None:
    """Of all orders and modes of four tasks, executed."""
    problem = interfering(random_problem(random.Random(seed), 4, 2), 2.5)
    solution = solved(problem)
    assert solution.execution.makespan <= 1.06 * _least_executed(problem)


def _least_executed(problem: Problem) -> int:
    """Return the least makespan with interference of all replays."""
    simulator = Simulator(problem)
    num_tasks = len(problem.tasks)
    return min(
        execute(problem, simulator.replay(order, modes)).makespan
        for order in permutations(range(num_tasks))
        if all(order.index(p) < order.index(t) for t in range(num_tasks) for p in problem.tasks[t].predecessors)
        for modes in product(*(range(len(task.modes)) for task in problem.tasks))
    )


@pytest.mark.parametrize("name", ["clip 4", "imagebind 6 split", "microbatches 4 x 2+3"])
def test_the_solution_of_a_real_model_is_near_the_bound(name: str) -> None:
    """Within 6 % with the work of two seconds."""
    problem = realistic_problems()[name]
    solution = solved(problem, Effort(work_s=2.0, time_limit_s=60.0))
    assert solution.schedule.makespan <= 1.06 * solution.bound


def test_a_time_limit_ends_the_search_and_is_reported() -> None:
    """What was found until then is still a plan, and what was proven a bound."""
    problem = realistic_problems()["microbatches 8 x 2+4"]
    solution = solve(problem, Effort(time_limit_s=0.0))
    assert problem.violations(solution.schedule) == ()
    assert 0 < solution.bound <= lower_bound(problem) <= solution.schedule.makespan
    assert solution.stopped_early


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("infeasible", "claims infeasibility, but a valid schedule is known; it is kept"),
        ("feasible", None),
        ("unknown", None),
    ],
)
def test_a_solver_that_is_wrong_or_silent_leaves_what_is_known(
    status: cp_sat.Status, says: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Claims that contradict a known schedule are logged; the plan is that of list schedules and annealing."""
    problem = realistic_problems()["imagebind 4"]
    serial = serial_schedule(problem) if status == "feasible" else None

    def claim(*_args: Any, **_kwargs: Any) -> cp_sat.SolverOutcome:
        return cp_sat.SolverOutcome(status=status, schedule=serial, bound=0, reached_time_limit=False)

    without = solve(problem, replace(QUICK, use_solver=False))
    monkeypatch.setattr(cp_sat, "solve_with_cp_sat", claim)
    solution = solved(problem)
    assert solution.schedule.makespan <= without.schedule.makespan
    assert not solution.is_from_solver and solution.solver is not None
    assert [says in record.getMessage() for record in caplog.records if says] == [True] * len(caplog.records)
    assert bool(caplog.records) == bool(says)


def test_that_a_solver_is_sure_is_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A false proof ends the search, but the gap stays that over our own bound."""

    def claim(problem: Problem, *, hint: TaskSchedule, **_kwargs: Any) -> cp_sat.SolverOutcome:
        return cp_sat.SolverOutcome(status="optimal", schedule=hint, bound=hint.makespan, reached_time_limit=False)

    monkeypatch.setattr(cp_sat, "solve_with_cp_sat", claim)
    problems = (random_problem(random.Random(seed), 8, 4) for seed in range(100))
    problem = next(p for p in problems if min(s.makespan for s in greedy_schedules(p)) > lower_bound(p))
    solution = solved(problem)
    assert solution.proof == "solver"
    assert solution.bound == lower_bound(problem) < solution.schedule.makespan


@pytest.mark.parametrize("num_tasks", [0, 1])
def test_a_plan_that_is_as_short_as_the_bound_ends_the_search(num_tasks: int) -> None:
    """A task cannot be shorter than itself, nor nothing than nothing; the solver is not asked."""
    problem = random_problem(random.Random(0), num_tasks, 4)
    solution = solved(problem)
    assert (len(solution.schedule.modes), solution.proof) == (num_tasks, "bound")
    assert solution.solver is None
    assert not solution.stopped_early


def test_an_ordinary_search_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Schedules that resources do not allow are dropped silently when they come from list schedules."""
    rng = random.Random(4)
    solve(limited(rng, random_problem(rng, 8, 4)), QUICK)
    assert caplog.records == []
