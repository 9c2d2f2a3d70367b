"""The planner: from a problem to the best schedule found, with a bound.

    solve(problem, effort) -> Solution

Stages, on the plain problem (no interference) and, where tasks slow each other, on a second version in which every mode
that leaves units to others is already slowed by an average neighbour:
    serial      every task in its reference mode, one after the other
    greedy      list schedules (`greedy.py`)
    annealing   local search from the best of them (`annealing.py`)
    solver      CP-SAT, hinted with the best so far, for up to `MAX_SOLVER_TASKS` tasks
The best schedule of a stage per set of lanes in use becomes a candidate if `Problem.violations` finds nothing.
Candidates are ranked by their makespan with interference (`simulate.execute`); ties go to the first one, and serial
comes first, so it is kept unless another one is shorter. A schedule that is short without interference is often, but
not always, short with it; hence several candidates. A stage is skipped when the best makespan already equals the bound.
For up to `MAX_TASKS_SOLVED_FIRST` tasks the solver runs before annealing, which is skipped if the solver reports an
optimum; it mostly does so in a tenth of the time of annealing.

The bound is our own (`bounds.py`). `Solution.proof` distinguishes two claims: "bound", the makespan equals the bound;
"solver", CP-SAT reports an optimum. Both are about the schedule without interference.

Solver outcomes: optimal, feasible -> a candidate; unknown -> no change; infeasible -> a warning if a valid schedule is
known, since the solver is then wrong, `InfeasiblePlanError` otherwise; invalid -> a warning, since its schedule
violates a constraint.

Effort is fixed by default: budgets are numbers of moves and the solver's deterministic time, sized to fit within the
time limit on a machine a quarter as fast as the one they were measured on, if the bound is computed quickly, as it is
for up to 300 tasks. The limit is then a safety net, and the solution says whether it was reached. Otherwise budgets are
seconds, and CP-SAT uses up to `MAX_WORKERS` cores.

Guarantees: the schedule is valid; with lanes only, never longer with interference than serial; bound <= makespan; the
same problem and effort give the same solution unless it says that it stopped early.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner.annealing import anneal
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedules
from apollo_compile.planner.problem import Mode, Problem, Schedule
from apollo_compile.planner.simulate import Execution, Simulator, execute, serial_schedule

logger = logging.getLogger(__name__)

MAX_SOLVER_TASKS = 40
"""Largest number of tasks for which CP-SAT always runs; with more, it runs without lanes, or if it is needed."""
MAX_TASKS_SOLVED_FIRST = 16
MAX_TASKS_FOR_SECOND_BOUND = 100
MAX_STARTS = 3
"""Schedules from which annealing starts."""
SOLVER_SHARE = 0.45
ANNEALING_SHARE, ANNEALING_SHARE_ALONE = 0.45, 0.9
"""Shares of the work, of annealing with and without the solver; the rest is for the bound and the list schedules."""
MOVES_PER_WALK = 2_500
"""More effort means more walks, not longer ones: the result of a walk depends on its first moves."""
SECONDS_PER_MOVE = 20e-6
SECONDS_PER_MOVE_AND_TASK = 0.4e-6
"""Assumed time of a move of annealing: twice the measured time, as a margin."""
DETERMINISTIC_TIME_PER_SECOND = 0.06
"""CP-SAT's deterministic time that fits into a second."""
WORK_SHARE = 0.5
"""Share of the time limit that fixed budgets are sized for; the rest is a margin for slower machines."""
BOUND_SHARE = 0.5
"""Share of the time limit after which the bound of a large problem is not improved further."""
MAX_WORKERS = 8
"""Threads of the solver where effort is not fixed: its portfolio has about as many distinct searches."""
LEAST_TIME_S = 0.02
"""Least remaining time for a further stage to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of search."""

    seed: int = 0
    time_limit_s: float = 2.0
    is_fixed: bool = True
    """Whether budgets are counts, equal on all machines, or seconds, with up to `MAX_WORKERS` cores for the solver."""
    work_s: float | None = None
    """Seconds that budgets are sized for; None is a share of the time limit."""
    use_solver: bool = True
    use_ortools: bool = True
    """Whether OR-Tools may be used: for the bound, and with `use_solver` for the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolutionCandidate:
    """A valid schedule that was considered."""

    name: str
    makespan: int
    executed: int
    """Makespan with interference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The best candidate, and how it was found."""

    schedule: Schedule
    execution: Execution
    bound: int
    """No valid schedule is shorter, with or without interference."""
    proof: Literal["bound", "solver"] | None
    """Source of the claim that no schedule is shorter without interference; None if there is no such claim."""
    candidates: tuple[SolutionCandidate, ...]
    """Candidates, in the order in which they were considered."""
    chosen: int
    """Index of the candidate that was chosen."""
    is_from_solver: bool
    stopped_early: bool
    """Whether the time limit ended or skipped a stage, so that another machine may find another plan."""
    seed: int
    solver: str | None
    """Name and version of the solver; None if it did not run."""


def solve(problem: Problem, effort: Effort) -> Solution:
    """Return the best schedule found within the effort.

    Raises:
        InfeasiblePlanError: no schedule that keeps all limits exists, or none was found.
    """
    search = _Search(problem, effort)
    serial = serial_schedule(problem)
    search.offer("serial", problem, [serial], is_required=False)
    if _slows_neighbours(problem):
        search.search("", problem, share=0.6)
        if search.has_time():
            search.search("slowed: ", _slowed(problem), share=0.4)
    else:
        search.search("", problem, share=1.0)
    return search.solution()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A valid schedule of the plain problem."""

    name: str
    schedule: Schedule
    execution: Execution
    is_from_solver: bool


class _Search:
    """One call of `solve`: the candidates so far, and the remaining effort."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem = problem
        self.effort = effort
        self.deadline = time.monotonic() + effort.time_limit_s
        share = WORK_SHARE if effort.is_fixed else 1.0
        self.work_s = share * effort.time_limit_s if effort.work_s is None else effort.work_s
        self.simulator = Simulator(problem)
        bound_deadline = self.deadline - (1 - BOUND_SHARE) * effort.time_limit_s
        self.bound = lower_bound(problem, use_program=effort.use_ortools, deadline=bound_deadline)
        self.found: list[_Found] = []
        self.known: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.solver_optimum: int | None = None
        """Least makespan of the plain problem, if CP-SAT reports one."""
        self.solver: str | None = None
        self.stopped_early = time.monotonic() >= bound_deadline

    def search(self, name: str, version: Problem, *, share: float) -> None:
        """Run all stages on a version of the problem, with a share of the effort."""
        # The bound of the plain problem is valid for longer durations too; large problems use it to save time.
        is_small = len(version.tasks) <= MAX_TASKS_FOR_SECOND_BOUND
        is_new = version is not self.problem and is_small and self.effort.use_ortools
        bound = lower_bound(version, deadline=self.deadline) if is_new else self.bound
        starts = self.offer(f"{name}greedy", version, greedy_schedules(version), is_required=False)
        starts = sorted(starts, key=_makespan)[:MAX_STARTS]
        best = starts[0] if starts else None
        solver_first = self.effort.use_solver and len(version.tasks) <= MAX_TASKS_SOLVED_FIRST
        if solver_first and (best is None or best.makespan > bound) and self.has_time():
            solved, is_sure = self._solve(f"{name}solver", version, best, bound, share)
            if is_sure:
                return
            if solved is not None and (best is None or solved.makespan < best.makespan):
                best, starts = solved, [solved, *starts][:MAX_STARTS]
        if best is not None and best.makespan > bound and version.atom_sizes and self.has_time():
            best = self._anneal(version, starts, share)
            self.offer(f"{name}annealed", version, [best])
        is_left = self.effort.use_solver and not solver_first and (best is None or _suits_solver(version))
        if is_left and (best is None or best.makespan > bound) and self.has_time():
            self._solve(f"{name}solver", version, best, bound, share)

    def offer(
        self, name: str, version: Problem, schedules: Iterable[Schedule], *, is_required: bool = True
    ) -> list[Schedule]:
        """Make the best schedule per set of lanes in use a candidate; return all of these that are valid.

        Arguments:
            name: name of the stage.
            version: the problem for which the schedules were made.
            schedules: schedules that the stage found.
            is_required: whether an invalid schedule is a defect of the stage, which is logged.
        """
        best: dict[tuple[int, ...], Schedule] = {}
        for schedule in sorted(schedules, key=_makespan):
            lanes = tuple(sorted({version.mode(schedule, task).lane for task in range(len(version.tasks))}))
            if lanes not in best and self._is_valid(name, version, schedule, is_required):
                best[lanes] = schedule
        for lanes, schedule in best.items():
            self._add(name if len(best) == 1 else f"{name} on lanes {' '.join(map(str, lanes))}", version, schedule)
        return list(best.values())

    def solution(self) -> Solution:
        """Return the best candidate; the first one wins ties."""
        if not self.found:
            raise _infeasible(self.problem, self.effort, self.solver)
        chosen = min(range(len(self.found)), key=lambda index: self.found[index].execution.makespan)
        found = self.found[chosen]
        makespan = found.schedule.makespan
        return Solution(
            schedule=found.schedule,
            execution=found.execution,
            bound=self.bound,
            proof="bound" if makespan == self.bound else "solver" if makespan == self.solver_optimum else None,
            candidates=tuple(
                SolutionCandidate(name=found.name, makespan=found.schedule.makespan, executed=found.execution.makespan)
                for found in self.found
            ),
            chosen=chosen,
            is_from_solver=found.is_from_solver,
            stopped_early=self.stopped_early,
            seed=self.effort.seed,
            solver=self.solver,
        )

    def _is_valid(self, name: str, version: Problem, schedule: Schedule, is_required: bool) -> bool:
        violations = version.violations(schedule)
        if violations and is_required:
            logger.warning("the schedule of stage '%s' is dropped: it violates a constraint: %s", name, violations[0])
        return not violations

    def _add(self, name: str, version: Problem, schedule: Schedule, *, is_from_solver: bool = False) -> None:
        """Add a valid schedule of a version as candidate, replayed on the plain problem with its order and modes."""
        if version is not self.problem:
            order = sorted(range(len(schedule.starts)), key=schedule.starts.__getitem__)
            schedule = self.simulator.replay(order, schedule.modes)
            if not self.problem.is_valid(schedule):  # shorter tasks overlap differently, and may exceed resources
                return
        key = (schedule.modes, schedule.starts)
        if key not in self.known:
            self.known.add(key)
            self.found.append(
                _Found(
                    name=name,
                    schedule=schedule,
                    execution=execute(self.problem, schedule),
                    is_from_solver=is_from_solver,
                )
            )

    def has_time(self) -> bool:
        """Return whether there is time for another stage; if not, set `stopped_early`."""
        has_time = time.monotonic() + LEAST_TIME_S < self.deadline
        self.stopped_early |= not has_time
        return has_time

    def _anneal(self, version: Problem, starts: list[Schedule], share: float) -> Schedule:
        """Return the best schedule of several walks, which start alternately from `starts` and from the best so far."""
        effort = self.effort
        is_alone = not _suits_solver(version)
        seconds = (ANNEALING_SHARE_ALONE if is_alone else ANNEALING_SHARE) * share * self.work_s
        moves = seconds / (SECONDS_PER_MOVE + SECONDS_PER_MOVE_AND_TASK * len(version.tasks))
        num_walks = max(2, round(moves / MOVES_PER_WALK))
        deadline = self.deadline if effort.is_fixed else time.monotonic() + seconds
        best = starts[0]
        for walk in range(num_walks) if effort.is_fixed else itertools.count():
            start = best if walk % 2 or walk + 1 == num_walks else starts[walk // 2 % len(starts)]
            seed = 1000 * effort.seed + walk
            annealed = anneal(version, start, seed=seed, iterations=round(moves / num_walks), deadline=deadline)
            best = min(best, annealed.schedule, key=_makespan)
            if annealed.reached_deadline:
                self.stopped_early = True
                break
        return best

    def _solve(
        self, name: str, version: Problem, best: Schedule | None, bound: int, share: float
    ) -> tuple[Schedule | None, bool]:
        """Return the solver's schedule, if there is a valid one, and whether the solver reports it as optimal."""
        from apollo_compile.planner import cp_sat

        effort = self.effort
        self.solver = cp_sat.solver_version()
        seconds = SOLVER_SHARE * share * self.work_s
        left = self.deadline - time.monotonic()
        deterministic_time = seconds * DETERMINISTIC_TIME_PER_SECOND if effort.is_fixed else math.inf
        time_limit_s = left if effort.is_fixed else min(left, seconds)
        outcome = cp_sat.solve_with_cp_sat(
            version,
            hint=best,
            lower_bound=bound,
            seed=effort.seed,
            deterministic_time=deterministic_time,
            time_limit_s=time_limit_s,
            workers=1 if effort.is_fixed else min(MAX_WORKERS, len(os.sched_getaffinity(0))),
        )
        # near the limit, the solver's own clock cannot tell which of its two limits ended the search
        self.stopped_early |= outcome.reached_time_limit or not self.has_time()
        match outcome.status:
            case "optimal" | "feasible":
                schedule = outcome.schedule
                assert schedule is not None  # these two have one
                if not self._is_valid(name, version, schedule, is_required=True):
                    return None, False
                self._add(name, version, schedule, is_from_solver=True)
                if best is not None and schedule.makespan > best.makespan:
                    logger.warning(
                        "%s returned a longer schedule (%d) than its hint (%d); the hint is kept",
                        self.solver,
                        schedule.makespan,
                        best.makespan,
                    )
                    return schedule, False
                if outcome.status == "optimal" and version is self.problem:
                    self.solver_optimum = schedule.makespan
                return schedule, outcome.status == "optimal"
            case "infeasible" if best is not None:
                logger.warning("%s claims infeasibility, but a valid schedule is known; it is kept", self.solver)
            case "infeasible" | "unknown" | "invalid":
                logger.debug("%s: %s", self.solver, outcome.status)
        return None, False


def _suits_solver(problem: Problem) -> bool:
    """Return whether CP-SAT can be expected to improve a schedule: without lanes, or for few tasks."""
    return not problem.atom_sizes or len(problem.tasks) <= MAX_SOLVER_TASKS


def _makespan(schedule: Schedule) -> int:
    return schedule.makespan


def _slows_neighbours(problem: Problem) -> bool:
    everything = problem.lanes[0]
    has_neighbours = any(lane < everything for lane in problem.lanes)
    return has_neighbours and max(factor for row in problem.interference.slowdown for factor in row) > 1


def _slowed(problem: Problem) -> Problem:
    """Return the problem with every mode that leaves units to others slowed by an average neighbour on those units."""
    everything = problem.lanes[0]
    duration = sum(task.modes[0].duration for task in problem.tasks)
    average = sum(task.modes[0].duration * task.modes[0].memory_share for task in problem.tasks) / max(1, duration)

    def slow(mode: Mode) -> Mode:
        if problem.lanes[mode.lane] == everything:
            return mode
        return replace(mode, duration=round(mode.duration * problem.interference.factor(mode.memory_share, average)))

    tasks = tuple(replace(task, modes=tuple(slow(mode) for mode in task.modes)) for task in problem.tasks)
    return replace(problem, tasks=tasks)


def _infeasible(problem: Problem, effort: Effort, solver: str | None) -> InfeasiblePlanError:
    """Return the error that names every limit and the task that needs most of it."""
    needs = []
    for resource, capacity in enumerate(problem.capacities):
        held = [0] * len(problem.tasks)
        for hold in problem.holds:
            held[hold.task] += hold.amount if hold.resource == resource else 0
        least = [
            held[task] + min(mode.demands[resource] if mode.demands else 0 for mode in problem.tasks[task].modes)
            for task in range(len(problem.tasks))
        ]
        largest = max(range(len(least)), key=least.__getitem__)
        needs.append(
            f"renewable resource {resource} has {capacity}, task {largest} alone needs {least[largest]}, "
            f"the serial schedule {problem.peak(serial_schedule(problem), resource)}"
        )
    return InfeasiblePlanError(
        f"no schedule of {len(problem.tasks)} tasks found within {effort.time_limit_s} s "
        f"by {solver or 'list schedules'}: {'; '.join(needs)}; "
        "raise these limits, or the time limit if they suffice"
    )
