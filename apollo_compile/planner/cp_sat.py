"""Constraint programming: search for the shortest schedule with CP-SAT.

    solve_with_cp_sat(problem, hint=..., ...) -> SolverOutcome

The modes that a schedule may need (`modes.py`) become a model (`model.py`), with a valid schedule as a hint. Where the
hint uses a dropped mode, it is changed to the mode that dominates it.

A status is a claim of the solver: schedules are checked here with `Problem.violations`, and only a schedule whose
makespan equals our own bound (`bounds.py`) is proven optimal. Where the model is tighter than the problem, neither its
optimum nor its infeasibility is reported.

Deterministic with one worker: the same problem, hint, seed and deterministic time give the same schedule, unless the
time limit ended the search, which the outcome says. With several workers, search times vary widely: on one published
instance half of the seeds end within 2 s, the others not within 10 s. So the search restarts with another seed after
`RESTART_S`, repeatedly, each time with as much time as all searches before it together.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.model import Model, TaskMode, build_model
from apollo_compile.planner.modes import is_as_good, kept_modes
from apollo_compile.planner.problem import Problem, Schedule
from apollo_compile.planner.replay import left_shifted, makespan_of

logger = logging.getLogger(__name__)

COMPLETE_SUBSOLVER = "reduced_costs"
"""Subsolver that is added with several workers: the best one in our tests on published instances."""

RESTART_S = 3.0
"""Time until the first restart with another seed, with several workers."""

Status = Literal["optimal", "feasible", "unknown", "infeasible", "invalid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverOutcome:
    """Status and schedule of a search; the schedule is valid."""

    status: Status
    """ "optimal": CP-SAT claims it. "invalid": its schedule violates a constraint and was dropped."""
    schedule: Schedule | None
    bound: int
    """Lower bound that CP-SAT claims; at least the `lower_bound` that it was given."""
    reached_time_limit: bool
    """Whether the time limit ended the search, so that another run may find another schedule."""


def solver_version() -> str:
    """Return the name and version of the solver."""
    return f"OR-tools CP-SAT {version('ortools')}"


def solve_with_cp_sat(
    problem: Problem,
    *,
    hint: Schedule | None,
    lower_bound: int,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
    workers: int = 1,
) -> SolverOutcome:
    """Search for the shortest schedule; the result is not longer than the hint.

    Arguments:
        problem: the problem to solve.
        hint: a valid schedule from which the search begins; None if none is known.
        lower_bound: a proven lower bound; 0 if none is known.
        seed: seed of the search.
        deterministic_time: limit in CP-SAT's own measure of work; may be infinite.
        time_limit_s: wall-clock limit, as a safety net.
        workers: threads; with more than one, results vary from run to run.

    Raises:
        InvariantError: the hint is not valid or shorter than the lower bound, or the model is malformed.
    """
    deadline = time.monotonic() + time_limit_s
    if hint is not None:
        _check_start(problem, hint, lower_bound)
        if hint.makespan == lower_bound:
            return SolverOutcome(status="optimal", schedule=hint, bound=lower_bound, reached_time_limit=False)
    if not problem.tasks:
        nothing = Schedule(modes=(), starts=(), makespan=0)
        return SolverOutcome(status="optimal", schedule=nothing, bound=0, reached_time_limit=False)
    kept = kept_modes(problem)
    longest = hint.makespan if hint is not None else _longest(problem, kept) if all(kept) else -1
    if lower_bound > longest:
        return SolverOutcome(status="infeasible", schedule=None, bound=lower_bound, reached_time_limit=False)
    model = build_model(problem, kept, (lower_bound, longest))
    if hint is not None:
        _add_hint(model, hint)
    left_s = deadline - time.monotonic()
    if left_s <= 0:  # CP-SAT rejects a model with a negative limit
        return SolverOutcome(status="unknown", schedule=None, bound=lower_bound, reached_time_limit=True)
    run = search if workers == 1 else search_with_restarts
    answer = run(model, seed=seed, deterministic_time=deterministic_time, time_limit_s=left_s, workers=workers)
    return _judge(problem, answer, model.is_exact, lower_bound)


def _check_start(problem: Problem, start: Schedule, lower_bound: int) -> None:
    """Raise `InvariantError` if a schedule is not valid, or shorter than the bound."""
    violations = problem.violations(start)
    if violations:
        raise InvariantError(f"the hint for CP-SAT is not a valid schedule: {violations[0]}")
    if start.makespan < lower_bound:
        raise InvariantError(f"the hint has makespan {start.makespan}, below the lower bound {lower_bound}")


def _judge(problem: Problem, answer: Answer, is_exact: bool, lower_bound: int) -> SolverOutcome:
    """Return the outcome for the problem, after checking the schedule of the answer."""
    status: Status = answer.status
    bound, schedule = max(lower_bound, answer.bound), None
    if answer.starts:
        makespan = makespan_of(problem, answer.starts, answer.modes)
        schedule = Schedule(modes=answer.modes, starts=answer.starts, makespan=makespan)
        violations = problem.violations(schedule)
        if violations:
            logger.warning("CP-SAT's schedule is dropped: it violates a constraint: %s", violations[0])
            return SolverOutcome(
                status="invalid", schedule=None, bound=lower_bound, reached_time_limit=answer.reached_time_limit
            )
        schedule = left_shifted(problem, answer.starts, answer.modes)
    if not is_exact:  # claims about the model do not hold for the problem
        bound = lower_bound
        status = "feasible" if status == "optimal" else "unknown" if status == "infeasible" else status
    if schedule is not None and schedule.makespan < bound:
        logger.warning("CP-SAT's lower bound %d is dropped: a schedule of %d exists", bound, schedule.makespan)
        status, bound = "feasible", lower_bound
    return SolverOutcome(status=status, schedule=schedule, bound=bound, reached_time_limit=answer.reached_time_limit)


def _longest(problem: Problem, kept: Sequence[Sequence[int]]) -> int:
    """Return an upper bound of the shortest makespan: at every instant of it a task runs or a hand-over takes place."""
    slowest = (max(problem.tasks[task].modes[mode].duration for mode in modes) for task, modes in enumerate(kept))
    return sum(slowest) + problem.handover * max(0, len(kept) - 1)


def _add_hint(model: Model, schedule: Schedule) -> None:
    """Hint every variable; a mode that is not in the model is replaced by one that is as good."""
    cp, problem = model.cp, model.problem
    kept = [[task_mode.index for task_mode in task_modes] for task_modes in model.task_modes]
    ends: list[int] = []
    modes: list[int] = []
    for task, task_modes in enumerate(model.task_modes):
        start, chosen = schedule.starts[task], schedule.modes[task]
        if chosen not in kept[task]:
            chosen = next(mode for mode in kept[task] if is_as_good(problem, task, mode, chosen))
        ends.append(start + problem.tasks[task].modes[chosen].duration)
        cp.add_hint(model.starts[task], start)
        for task_mode in task_modes:
            cp.add_hint(task_mode.on, task_mode.index == chosen)
        cp.add_hint(model.ends[task], ends[-1])
        for task_mode in task_modes:
            if task_mode.start is not model.starts[task]:
                cp.add_hint(task_mode.start, start)
        modes.append(chosen)
    for variable, amounts in model.choices:
        cp.add_hint(variable, next(amount for task_mode, amount in amounts if task_mode.index == modes[task_mode.task]))
    for lifetime in model.lifetimes:
        last = max(ends[task] for task in (lifetime.hold.task, *lifetime.hold.readers))
        cp.add_hint(lifetime.last, last)
        cp.add_hint(lifetime.length, last - schedule.starts[lifetime.hold.task])
    cp.add_hint(model.makespan, max(ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """CP-SAT's answer for a model."""

    status: Literal["optimal", "feasible", "unknown", "infeasible"]
    starts: tuple[int, ...]
    modes: tuple[int, ...]
    """Starts and modes are empty if no schedule was found."""
    bound: int
    deterministic_time: float
    reached_time_limit: bool


def search(
    model: Model,
    *,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
    workers: int = 1,
) -> Answer:
    """Run CP-SAT on a model.

    Raises:
        InvariantError: CP-SAT rejects the model.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = workers
    parameters.random_seed = seed
    parameters.max_deterministic_time = deterministic_time
    parameters.max_time_in_seconds = time_limit_s
    parameters.max_presolve_iterations = 3
    parameters.catch_sigint_signal = False  # Python handles interrupts
    if workers > 1:
        parameters.subsolvers.append(COMPLETE_SUBSOLVER)
    status = solver.solve(model.cp)
    if status == cp_model.MODEL_INVALID:
        raise InvariantError(f"CP-SAT rejects the planner's model: {model.cp.validate()}")
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = solver.best_objective_bound
    return Answer(
        status=_STATUSES[status],
        starts=tuple(solver.value(start) for start in model.starts) if is_found else (),
        modes=tuple(_chosen(solver, task_modes) for task_modes in model.task_modes) if is_found else (),
        bound=round(bound) if math.isfinite(bound) else 0,
        deterministic_time=solver.deterministic_time,
        reached_time_limit=solver.wall_time >= time_limit_s,
    )


def search_with_restarts(
    model: Model, *, seed: int, deterministic_time: float, time_limit_s: float, workers: int
) -> Answer:
    """Run CP-SAT with one seed after another, each hinted with the best schedule so far, until a proof or the limit."""
    begin = time.monotonic()
    answer: Answer | None = None
    spent, bound = 0.0, 0
    for later_seed in itertools.count(seed):
        passed_s = time.monotonic() - begin
        later = search(
            model,
            seed=later_seed,
            deterministic_time=deterministic_time - spent,
            time_limit_s=min(max(RESTART_S, passed_s), max(0.0, time_limit_s - passed_s)),
            workers=workers,
        )
        spent += later.deterministic_time
        bound = max(bound, later.bound)
        if (
            answer is None
            or not answer.starts
            or (later.starts and _makespan(model, later) <= _makespan(model, answer))
        ):
            answer = later
        is_over = time.monotonic() - begin >= time_limit_s
        if later.status in ("optimal", "infeasible") or spent >= deterministic_time or is_over:
            return replace(answer, bound=bound, deterministic_time=spent, reached_time_limit=is_over)
        if answer.starts:
            model.cp.clear_hints()  # type: ignore[no-untyped-call]
            _add_hint(model, Schedule(modes=answer.modes, starts=answer.starts, makespan=_makespan(model, answer)))
        model.cp.add(model.makespan >= bound)
    raise AssertionError  # the count has no end


def _makespan(model: Model, answer: Answer) -> int:
    return makespan_of(model.problem, answer.starts, answer.modes)


_STATUSES: dict[cp_model.CpSolverStatus, Literal["optimal", "feasible", "unknown", "infeasible"]] = {
    cp_model.OPTIMAL: "optimal",
    cp_model.FEASIBLE: "feasible",
    cp_model.UNKNOWN: "unknown",
    cp_model.INFEASIBLE: "infeasible",
}


def _chosen(solver: cp_model.CpSolver, task_modes: Sequence[TaskMode]) -> int:
    return next(task_mode.index for task_mode in task_modes if solver.boolean_value(task_mode.on))
