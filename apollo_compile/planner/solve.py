"""The planner: from a problem to the best schedule found, with a bound.

    solve(problem, effort) -> Solution

Stages:
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

If the solver claims infeasibility although a valid schedule is known, it is wrong, and a warning says so.

Effort is fixed: budgets are numbers of moves and the solver's deterministic time. They fit within the time limit on a
machine a quarter as fast as the one they were measured on, if the bound is computed quickly, as it is for up to 300
tasks. The limit is then a safety net, and the solution says whether it was reached.

Guarantees: the schedule is valid; with lanes only, never longer with interference than serial; bound <= makespan; the
same problem and effort give the same solution unless it says that it stopped early.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner.annealing import anneal
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedules
from apollo_compile.planner.problem import MAKESPAN, Problem, TaskSchedule
from apollo_compile.planner.simulate import Execution, execute, serial_schedule

logger = logging.getLogger(__name__)

MAX_SOLVER_TASKS = 40
"""Largest number of tasks for which CP-SAT always runs; with more, it runs without lanes, or if it is needed."""
MAX_TASKS_SOLVED_FIRST = 16
MAX_STARTS = 3
"""Schedules from which annealing starts."""
SOLVER_SHARE = 0.45
ANNEALING_SHARE, ANNEALING_SHARE_ALONE = 0.7, 1.2
"""Shares of the work, of annealing with and without the solver; a move takes half of its assumed time."""
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
LEAST_TIME_S = 0.02
"""Least remaining time for a further stage to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of search."""

    seed: int = 0
    time_limit_s: float = 2.0
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

    schedule: TaskSchedule
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
    search.offer("serial", [serial_schedule(problem)])
    search.run()
    return search.solution()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A valid schedule."""

    name: str
    schedule: TaskSchedule
    execution: Execution
    is_from_solver: bool


class _Search:
    """One call of `solve`: the candidates so far, and the remaining effort."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem = problem
        self.effort = effort
        self.deadline = time.monotonic() + effort.time_limit_s
        self.work_s = WORK_SHARE * effort.time_limit_s if effort.work_s is None else effort.work_s
        bound_deadline = self.deadline - (1 - BOUND_SHARE) * effort.time_limit_s
        self.bound = lower_bound(problem, use_program=effort.use_ortools, deadline=bound_deadline)
        self.found: list[_Found] = []
        self.known: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.solver_optimum: int | None = None
        """Least makespan, if CP-SAT reports one."""
        self.solver: str | None = None
        self.stopped_early = time.monotonic() >= bound_deadline

    def run(self) -> None:
        """Run all stages after the serial schedule."""
        problem = self.problem
        starts = self.offer("greedy", greedy_schedules(problem))
        starts = sorted(starts, key=MAKESPAN)[:MAX_STARTS]
        best = starts[0] if starts else None
        solver_first = self.effort.use_solver and len(problem.tasks) <= MAX_TASKS_SOLVED_FIRST
        if solver_first and self._is_worthwhile(best):
            solved, is_sure = self._solve(best)
            if is_sure:
                return
            if solved is not None and (best is None or solved.makespan < best.makespan):
                best, starts = solved, [solved, *starts][:MAX_STARTS]
        if best is not None and problem.atom_sizes and self._is_worthwhile(best):
            best = self._anneal(starts)
            self.offer("annealed", [best])
        is_left = self.effort.use_solver and not solver_first and (best is None or _suits_solver(problem))
        if is_left and self._is_worthwhile(best):
            self._solve(best)

    def offer(self, name: str, schedules: Iterable[TaskSchedule]) -> list[TaskSchedule]:
        """Make the best schedule of a stage per set of lanes in use a candidate; return all of these that are valid."""
        best: dict[tuple[int, ...], TaskSchedule] = {}
        for schedule in sorted(schedules, key=MAKESPAN):
            lanes = tuple(sorted({self.problem.mode(schedule, task).lane for task in range(len(schedule.modes))}))
            if lanes not in best and self.problem.is_valid(schedule):
                best[lanes] = schedule
        for lanes, schedule in best.items():
            self._add(name if len(best) == 1 else f"{name} on lanes {' '.join(map(str, lanes))}", schedule)
        return list(best.values())

    def solution(self) -> Solution:
        """Return the best candidate; the first one wins ties."""
        if not self.found:
            raise InfeasiblePlanError(
                f"no schedule of {len(self.problem.tasks)} tasks that keeps the capacities {self.problem.capacities} "
                f"found within {self.effort.time_limit_s} s; raise them, or the time limit if they suffice"
            )
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

    def _add(self, name: str, schedule: TaskSchedule, *, is_from_solver: bool = False) -> None:
        """Add a valid schedule as candidate."""
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

    def _is_worthwhile(self, best: TaskSchedule | None) -> bool:
        """Return whether a further stage could shorten the best schedule, and there is time for it."""
        return (best is None or best.makespan > self.bound) and self._has_time()

    def _has_time(self) -> bool:
        """Return whether there is time for another stage; if not, set `stopped_early`."""
        has_time = time.monotonic() + LEAST_TIME_S < self.deadline
        self.stopped_early |= not has_time
        return has_time

    def _anneal(self, starts: list[TaskSchedule]) -> TaskSchedule:
        """Return the best schedule of several walks, which start alternately from `starts` and from the best so far."""
        problem = self.problem
        share = ANNEALING_SHARE if _suits_solver(problem) else ANNEALING_SHARE_ALONE
        moves = share * self.work_s / (SECONDS_PER_MOVE + SECONDS_PER_MOVE_AND_TASK * len(problem.tasks))
        num_walks = max(2, round(moves / MOVES_PER_WALK))
        best = starts[0]
        for walk in range(num_walks):
            start = best if walk % 2 or walk + 1 == num_walks else starts[walk // 2 % len(starts)]
            seed = 1000 * self.effort.seed + walk
            annealed = anneal(problem, start, seed=seed, iterations=round(moves / num_walks), deadline=self.deadline)
            best = min(best, annealed.schedule, key=MAKESPAN)
            if annealed.reached_deadline:
                self.stopped_early = True
                break
        return best

    def _solve(self, best: TaskSchedule | None) -> tuple[TaskSchedule | None, bool]:
        """Return the solver's schedule, if there is a valid one, and whether the solver reports it as optimal."""
        from apollo_compile.planner import cp_sat

        self.solver = f"OR-tools CP-SAT {version('ortools')}"
        outcome = cp_sat.solve_with_cp_sat(
            self.problem,
            hint=best,
            lower_bound=self.bound,
            seed=self.effort.seed,
            deterministic_time=SOLVER_SHARE * self.work_s * DETERMINISTIC_TIME_PER_SECOND,
            time_limit_s=self.deadline - time.monotonic(),
        )
        # near the limit, the solver's own clock cannot tell which of its two limits ended the search
        self.stopped_early |= outcome.reached_time_limit or not self._has_time()
        schedule = outcome.schedule
        if schedule is None:
            if outcome.status == "infeasible" and best is not None:
                logger.warning("%s claims infeasibility, but a valid schedule is known; it is kept", self.solver)
            return None, False
        self._add("solver", schedule, is_from_solver=True)
        is_sure = outcome.status == "optimal" and (best is None or schedule.makespan <= best.makespan)
        if is_sure:
            self.solver_optimum = schedule.makespan
        return schedule, is_sure


def _suits_solver(problem: Problem) -> bool:
    """Return whether CP-SAT can be expected to improve a schedule: without lanes, or for few tasks."""
    return not problem.atom_sizes or len(problem.tasks) <= MAX_SOLVER_TASKS
