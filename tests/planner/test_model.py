"""Models that showed which encoding is sound, and what the model makes of large numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from apollo_compile.planner.problem import ExecutionMode, Problem, Task
from tests.builders import a_task
from tests.planner.test_cp_sat import ask_solver

MODELS = Path(__file__).parent / "cpsat_repro"

OPTIMA = {"n6_seed368_false_infeasible": 3914, "n8_seed20_false_optimal": 2949}
"""Least makespans of the problems of `MODELS`, in the encoding that gives every alternative a start of its own."""

SOLVER_SEEDS = range(4)


def ask(name: str, encoding: str, seed: int) -> tuple[cp_model.CpSolverStatus, int | None]:
    """Return what the solver says of a model, and the makespan that it found."""
    model = cp_model.CpModel()
    assert model.proto.parse_text_format((MODELS / f"{name}.{encoding}.pbtxt").read_text())
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    return status, round(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


@pytest.mark.parametrize("seed", SOLVER_SEEDS)
@pytest.mark.parametrize(
    ("name", "encoding", "answer"),
    [
        *((name, "separate", (cp_model.OPTIMAL, optimum)) for name, optimum in OPTIMA.items()),
        ("n6_seed368_false_infeasible", "shared", (cp_model.INFEASIBLE, None)),
        ("n8_seed20_false_optimal", "shared", (cp_model.OPTIMAL, 2956)),
    ],
)
def test_the_solver_is_right_of_alternatives_with_starts_of_their_own_and_wrong_of_others(
    name: str, encoding: str, answer: tuple[cp_model.CpSolverStatus, int | None], seed: int
) -> None:
    """Our model gives them their own; OR-Tools 9.15 gets the same problem in fewer variables wrong.

    Where `shared` fails and OPTIMA is the answer, a new release has fixed it: `model.py` may share starts then.
    """
    assert ask(name, encoding, seed) == answer


@pytest.mark.parametrize("name", OPTIMA)
def test_our_model_solves_the_problems_on_which_the_shared_one_fails(name: str) -> None:
    """The problem is read back from its model; the schedule shows that the optimum is one."""
    problem = read_back((MODELS / f"{name}.shared.pbtxt").read_text())
    for seed in SOLVER_SEEDS:
        outcome = ask_solver(problem, seed=seed, deterministic_time=30.0)
        assert outcome.status == "optimal"
        assert problem.violations(outcome.schedule) == ()
        assert outcome.schedule.makespan == OPTIMA[name]


def read_back(text: str) -> Problem:
    """Return the problem of a model with shared starts: no demands, no hand-over, a lane per set of atoms."""
    model = cp_model.CpModel()
    assert model.proto.parse_text_format(text)
    constraints = list(model.proto.constraints)
    intervals = {
        index: (found.enforcement_literal[0], found.interval)
        for index, found in enumerate(constraints)
        if found.has_interval()
    }
    atoms = [set(found.no_overlap.intervals) for found in constraints if found.has_no_overlap()]
    choices = [set(found.exactly_one.literals) for found in constraints if found.has_exactly_one()]
    covers = {index: frozenset(a for a, users in enumerate(atoms) if index in users) for index in intervals}
    lanes = sorted(set(covers.values()), key=lambda lane: (-len(lane), sorted(lane)))
    runs = [[index for index, (on, _) in intervals.items() if on in choice] for choice in choices]
    starts = [intervals[own[0]][1].start.vars[0] for own in runs]
    ends = [intervals[own[0]][1].end.vars[0] for own in runs]
    edges = set()
    for found in constraints:
        if found.has_linear() and len(found.linear.vars) == 2 and found.linear.domain[0] == 0:
            later, earlier = found.linear.vars if found.linear.coeffs[0] > 0 else reversed(found.linear.vars)
            if later in starts and earlier in ends:
                edges.add((ends.index(earlier), starts.index(later)))
    tasks = tuple(
        Task(
            modes=tuple(
                ExecutionMode(lane=lanes.index(covers[index]), duration=intervals[index][1].size.offset)
                for index in sorted(own, key=lambda index: lanes.index(covers[index]))
            ),
            predecessors=tuple(sorted(before for before, after in edges if after == task)),
        )
        for task, own in enumerate(runs)
    )
    return Problem(tasks=tasks, lanes=tuple(lanes), atom_sizes=(1,) * len(atoms))


def test_rounded_amounts_give_a_valid_schedule_and_no_proof() -> None:
    """Amounts without a common divisor, a million times a million large; with one, nothing is rounded."""
    odd, even = [10**12 + 7 * number + 1 for number in range(4)], 4 * [10**12]
    for demands, capacity, status in ((odd, 2 * 10**12 + 10**9 + 1, "feasible"), (even, 2 * 10**12, "optimal")):
        tasks = (a_task(5 + number, demands=(demand,)) for number, demand in enumerate(demands))
        problem = Problem(tasks=tuple(tasks), capacities=(capacity,))
        outcome = ask_solver(problem)
        assert outcome.status == status
        assert problem.violations(outcome.schedule) == ()
        assert outcome.schedule.makespan == 13
        assert outcome.bound == (13 if status == "optimal" else 0)
