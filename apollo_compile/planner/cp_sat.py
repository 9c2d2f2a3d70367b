"""Constraint programming: search for the shortest schedule with CP-SAT.

    solve_with_cp_sat(problem, hint=..., ...) -> SolverOutcome

The modes that fit the capacities become a model (`model.py`), with a valid schedule as a hint. A schedule that it finds
is replayed, so that no task waits for nothing.

A status is a claim of the solver: schedules are checked here with `Problem.violations`, and only a schedule whose
makespan equals our own bound (`bounds.py`) is proven optimal. Where the model is tighter than the problem, neither its
optimum nor its infeasibility is reported.

Deterministic with one worker: the same problem, hint, seed and deterministic time give the same schedule, unless the
time limit ended the search, which the outcome says.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.model import Model, build_model
from apollo_compile.planner.problem import Problem, TaskSchedule
from apollo_compile.planner.simulate import Simulator

logger = logging.getLogger(__name__)

Status = Literal["optimal", "feasible", "unknown", "infeasible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverOutcome:
    """Status and schedule of a search."""

    status: Status
    """Claim of CP-SAT."""
    schedule: TaskSchedule | None
    bound: int
    """Lower bound that CP-SAT claims."""
    reached_time_limit: bool
    """Whether the time limit ended the search, so that another run may find another schedule."""


def solve_with_cp_sat(
    problem: Problem,
    *,
    hint: TaskSchedule | None,
    lower_bound: int,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
) -> SolverOutcome:
    """Search for the shortest schedule; the result is valid and not longer than the hint.

    Arguments:
        problem: the problem to solve.
        hint: a valid schedule from which the search begins; None if none is known.
        lower_bound: a proven lower bound; 0 if none is known.
        seed: seed of the search.
        deterministic_time: limit in CP-SAT's own measure of work; may be infinite.
        time_limit_s: wall-clock limit, as a safety net.

    Raises:
        InvariantError: CP-SAT rejects the model.
    """
    deadline = time.monotonic() + time_limit_s
    kept = [problem.fitting_modes(task) for task in range(len(problem.tasks))]
    longest = hint.makespan if hint is not None else _longest(problem, kept) if all(kept) else -1
    if lower_bound > longest:
        return SolverOutcome(status="infeasible", schedule=None, bound=lower_bound, reached_time_limit=False)
    model = build_model(problem, kept, (lower_bound, longest))
    if hint is not None:
        _add_hint(model, hint)
    left_s = deadline - time.monotonic()
    if left_s <= 0:  # CP-SAT rejects a model with a negative limit
        return SolverOutcome(status="unknown", schedule=None, bound=lower_bound, reached_time_limit=True)
    outcome = search(model, seed=seed, deterministic_time=deterministic_time, time_limit_s=left_s)
    return _judge(problem, replace(outcome, bound=max(lower_bound, outcome.bound)), model.is_exact, lower_bound)


def _judge(problem: Problem, outcome: SolverOutcome, is_exact: bool, lower_bound: int) -> SolverOutcome:
    """Return the outcome with a schedule and claims that hold for the problem."""
    schedule = outcome.schedule
    if schedule is not None:
        violations = problem.violations(schedule)
        if violations:
            logger.warning("CP-SAT's schedule is dropped: it violates a constraint: %s", violations[0])
            return replace(outcome, status="unknown", schedule=None, bound=lower_bound)
        order = sorted(range(len(schedule.starts)), key=schedule.starts.__getitem__)
        replayed = Simulator(problem).replay(order, schedule.modes)
        if not any(problem.resource_violations(replayed)):
            schedule = replayed
    is_refuted = schedule is not None and schedule.makespan < outcome.bound
    if is_refuted:
        logger.warning("CP-SAT's lower bound %d is dropped: a shorter schedule exists", outcome.bound)
    if is_exact and not is_refuted:
        return replace(outcome, schedule=schedule)
    return replace(outcome, status="unknown" if schedule is None else "feasible", schedule=schedule, bound=lower_bound)


def _longest(problem: Problem, kept: Sequence[Sequence[int]]) -> int:
    """Return an upper bound of the shortest makespan: at every instant of it a task runs or a hand-over takes place."""
    slowest = (max(problem.tasks[task].modes[mode].duration for mode in modes) for task, modes in enumerate(kept))
    return sum(slowest) + problem.handover * max(0, len(kept) - 1)


def _add_hint(model: Model, schedule: TaskSchedule) -> None:
    """Hint every variable."""
    cp, ends = model.cp, model.problem.ends(schedule)
    for task, task_modes in enumerate(model.task_modes):
        cp.add_hint(model.starts[task], schedule.starts[task])
        for task_mode in task_modes:
            cp.add_hint(task_mode.on, task_mode.index == schedule.modes[task])
        cp.add_hint(model.ends[task], ends[task])
        for task_mode in task_modes:
            if task_mode.start is not model.starts[task]:
                cp.add_hint(task_mode.start, schedule.starts[task])
    for variable, amounts in model.choices:
        chosen = (amount for task_mode, amount in amounts if task_mode.index == schedule.modes[task_mode.task])
        cp.add_hint(variable, next(chosen))
    for lifetime in model.lifetimes:
        last = max(ends[task] for task in (lifetime.hold.task, *lifetime.hold.readers))
        cp.add_hint(lifetime.last, last)
        cp.add_hint(lifetime.length, last - schedule.starts[lifetime.hold.task])
    cp.add_hint(model.makespan, max(ends))


def search(model: Model, *, seed: int, deterministic_time: float, time_limit_s: float) -> SolverOutcome:
    """Run CP-SAT on a model.

    Raises:
        InvariantError: CP-SAT rejects the model.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = deterministic_time
    parameters.max_time_in_seconds = time_limit_s
    parameters.max_presolve_iterations = 3
    parameters.catch_sigint_signal = False  # Python handles interrupts
    status = solver.solve(model.cp)
    if status == cp_model.MODEL_INVALID:
        raise InvariantError(f"CP-SAT rejects the planner's model: {model.cp.validate()}")
    schedule = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        schedule = TaskSchedule(
            modes=tuple(
                next(task_mode.index for task_mode in task_modes if solver.boolean_value(task_mode.on))
                for task_modes in model.task_modes
            ),
            starts=tuple(solver.value(start) for start in model.starts),
            makespan=max((solver.value(end) for end in model.ends), default=0),
        )
    bound = solver.best_objective_bound
    return SolverOutcome(
        status=_STATUSES[status],
        schedule=schedule,
        bound=round(bound) if math.isfinite(bound) else 0,
        reached_time_limit=solver.wall_time >= time_limit_s,
    )


_STATUSES: dict[cp_model.CpSolverStatus, Status] = {
    cp_model.OPTIMAL: "optimal",
    cp_model.FEASIBLE: "feasible",
    cp_model.UNKNOWN: "unknown",
    cp_model.INFEASIBLE: "infeasible",
}
