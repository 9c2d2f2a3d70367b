"""CP-SAT against exhaustive search, and the models that showed which encoding is sound."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.cp_sat import solve_with_cp_sat
from apollo_compile.planner.problem import Mode, Problem, Schedule, Task
from apollo_compile.planner.simulate import serial_schedule
from apollo_compile.planner.windows import improve_windows
from tests.builders import limited, random_problem, realistic_problems, seeds
from tests.planner.oracle import find_optimum

MODELS = Path(__file__).parent / "cpsat_repro"


@pytest.mark.parametrize("solver_seed", seeds(2, 3))
@pytest.mark.parametrize("seed", seeds(30, 60))
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(60, 200))
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


@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in MODELS.glob("*.shared.pbtxt")))
def test_our_encoding_solves_the_problems_on_which_the_shared_one_fails(name: str) -> None:
    """The problem is read back from its model; whatever is known to be feasible, we are not longer than."""
    problem = read_back((MODELS / f"{name}.shared.pbtxt").read_text())
    model = cp_model.CpModel()
    assert model.proto.parse_text_format((MODELS / f"{name}.separate.pbtxt").read_text())
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    for seed in range(4):
        outcome = solve_with_cp_sat(
            problem, hint=None, lower_bound=0, seed=seed, deterministic_time=30.0, time_limit_s=60.0
        )
        assert outcome.status == "optimal"
        assert outcome.schedule is not None
        assert problem.violations(outcome.schedule) == ()
        assert outcome.schedule.makespan == round(solver.objective_value)


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
                Mode(lane=lanes.index(covers[index]), duration=intervals[index][1].size.offset)
                for index in sorted(own, key=lambda index: lanes.index(covers[index]))
            ),
            predecessors=tuple(sorted(before for before, after in edges if after == task)),
        )
        for task, own in enumerate(runs)
    )
    return Problem(tasks=tasks, lanes=tuple(lanes), atom_sizes=(1,) * len(atoms))


def test_rounded_amounts_give_a_valid_schedule_and_no_proof() -> None:
    """Amounts without a common divisor, a million times a million large; with one, nothing is rounded."""
    tasks = tuple(Task(modes=(Mode(duration=5 + t, demands=(10**12 + 7 * t + 1,)),), predecessors=()) for t in range(4))
    for factor, capacity, status in ((1, 2 * 10**12 + 10**9 + 1, "feasible"), (10**12, 2 * 10**12, "optimal")):
        chosen = tasks
        if factor > 1:
            chosen = tuple(replace(t, modes=(replace(t.modes[0], demands=(factor,)),)) for t in tasks)
        problem = Problem(tasks=chosen, capacities=(capacity,))
        outcome = solve_with_cp_sat(
            problem, hint=None, lower_bound=0, seed=0, deterministic_time=5.0, time_limit_s=60.0
        )
        assert outcome.status == status
        assert outcome.schedule is not None
        assert problem.violations(outcome.schedule) == ()
        assert outcome.schedule.makespan == 13
        assert outcome.bound == (13 if status == "optimal" else 0)


def test_a_hint_in_a_mode_that_goes_is_still_a_start() -> None:
    """The slow mode is dominated; the result is the best of the fast ones."""
    modes = (Mode(duration=9, demands=(2,)), Mode(duration=4, demands=(1,)))
    problem = Problem(tasks=(Task(modes=modes, predecessors=()), Task(modes=modes, predecessors=(0,))), capacities=(2,))
    hint = Schedule(modes=(0, 0), starts=(0, 9), makespan=18)
    outcome = solve_with_cp_sat(problem, hint=hint, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=60.0)
    assert outcome.schedule == Schedule(modes=(1, 1), starts=(0, 4), makespan=8)


def test_a_start_that_is_not_valid_or_beats_the_bound_is_refused() -> None:
    """Both are errors of the caller."""
    problem = random_problem(random.Random(0), 4)
    serial = serial_schedule(problem)
    for start, bound in ((replace(serial, makespan=serial.makespan + 1), 0), (serial, serial.makespan + 1)):
        for search in (
            lambda start, bound: solve_with_cp_sat(
                problem, hint=start, lower_bound=bound, seed=0, deterministic_time=1.0, time_limit_s=9.0
            ),
            lambda start, bound: improve_windows(
                problem, start, lower_bound=bound, seed=0, deterministic_time=1.0, time_limit_s=9.0
            ),
        ):
            with pytest.raises(InvariantError):
                search(start, bound)


@pytest.mark.parametrize("seed", range(20))
def test_windows_keep_demands_holds_and_budgets(seed: int) -> None:
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


def test_two_processes_find_the_same_schedules() -> None:
    """Neither the hash seed nor the process matters."""
    script = """
import random
from apollo_compile.planner.cp_sat import solve_with_cp_sat
from apollo_compile.planner.windows import improve_windows
from apollo_compile.planner.simulate import serial_schedule
from tests.builders import random_problem
effort = dict(lower_bound=0, seed=3, deterministic_time=0.1, time_limit_s=60.0)
problem = random_problem(random.Random(3), 16, 4)
print(solve_with_cp_sat(problem, hint=None, **effort))
print(improve_windows(problem, serial_schedule(problem), **effort))
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
    """No time at all: nothing is found, or the start stays."""
    problem = random_problem(random.Random(1), 12, 4)
    start = serial_schedule(problem)
    whole = solve_with_cp_sat(
        problem, hint=None, lower_bound=0, seed=0, deterministic_time=9.0, time_limit_s=time_limit_s
    )
    windows = improve_windows(problem, start, lower_bound=0, seed=0, deterministic_time=9.0, time_limit_s=time_limit_s)
    assert whole.reached_time_limit and whole.status == "unknown"
    assert windows.reached_time_limit and windows.schedule is not None
    assert windows.schedule.makespan <= start.makespan


def test_nothing_takes_no_time() -> None:
    """A problem without tasks."""
    outcome = solve_with_cp_sat(
        Problem(tasks=()), hint=None, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=9.0
    )
    assert outcome.status == "optimal"
    assert outcome.schedule == Schedule(modes=(), starts=(), makespan=0)
