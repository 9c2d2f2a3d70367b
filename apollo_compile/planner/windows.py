"""Large neighbourhood search with CP-SAT, window by window, for problems with lanes that are too large for one model.

    improve_windows(problem, start, ...) -> SolverOutcome

In the order of starts, tasks before a window keep mode and start; tasks after it keep mode and order. For a task of the
window, the former become a release per mode, the latter a tail per mode: the longest chain of durations and hand-overs
after it, through its successors and through the next users of its atoms. So a model has the tasks of one window only,
and minimises the makespan of the whole schedule. After each window the order is replayed as early as possible. The
models have no renewable resources; the replay waits for them, and a result that is longer because of that, or does not
fit at all, is rejected.
Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998,
https://doi.org/10.1007/3-540-49481-2_30

Deterministic: the same problem, start, seed and deterministic time give the same schedule, unless the time limit
ended the search, which the outcome says.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from apollo_compile.planner.cp_sat import Answer, SolverOutcome, Status, check_start, search_part
from apollo_compile.planner.problem import Problem, Schedule, Task
from apollo_compile.planner.replay import left_shifted, makespan_of, replay

WINDOW_SIZES = (12, 18, 8)
"""Numbers of tasks of a window; the next size is used when no window of the current size improves the schedule."""
STEPS_TO_BOUND = 50
"""A window must close at least 1/50 of the gap to the lower bound, so that no time is spent on tiny improvements."""
WINDOW_TIME = 0.1
"""Limit of deterministic time per window."""
WINDOW_FEE = 0.004
"""Deterministic time charged per window for work outside CP-SAT, so that the number of windows is bounded."""


def improve_windows(
    problem: Problem,
    start: Schedule,
    *,
    lower_bound: int,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
) -> SolverOutcome:
    """Improve a schedule window by window; for problems with lanes that are too large for one model.

    Arguments:
        problem: what to schedule.
        start: a valid schedule; the result is not longer.
        lower_bound: proven elsewhere; reaching it ends the search, as "optimal".
        seed: of the search.
        deterministic_time: limit in CP-SAT's own measure of work; may be infinite.
        time_limit_s: wall-clock limit, as a safety net.

    Raises:
        InvariantError: `start` is not valid or shorter than the lower bound, or a model is malformed.
    """
    check_start(problem, start, lower_bound)
    deadline = time.monotonic() + time_limit_s
    best = left_shifted(problem, start.starts, start.modes)
    rng, spent, reached_time_limit = random.Random(seed), 0.0, False
    untried: list[tuple[int, int]] = _all_windows(len(problem.tasks), rng)
    while untried and best.makespan > lower_bound and spent + WINDOW_FEE < deterministic_time:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            reached_time_limit = True
            break
        first, size = untried.pop()
        window = _Window(problem, best, first, size)
        shorter = best.makespan - max(1, (best.makespan - lower_bound) // STEPS_TO_BOUND)
        spent += WINDOW_FEE
        if not window.has_room(shorter):
            continue
        answer = window.search(
            max(window.floor, lower_bound),
            shorter,
            seed=rng.randrange(1 << 30),
            deterministic_time=min(WINDOW_TIME, deterministic_time - spent),
            time_limit_s=left_s,
        )
        spent += answer.deterministic_time
        reached_time_limit |= answer.reached_time_limit
        found = window.replayed(answer) if answer.starts else None
        if found is not None and found.makespan < best.makespan:
            best = found
            untried = _all_windows(len(problem.tasks), rng)
    status: Status = "optimal" if best.makespan == lower_bound else "feasible"
    return SolverOutcome(status=status, schedule=best, bound=lower_bound, reached_time_limit=reached_time_limit)


def _all_windows(num_tasks: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return first position and size of the windows to try, in reverse order: all of one size, then of the next."""
    found: list[tuple[int, int]] = []
    for size in dict.fromkeys(min(size, num_tasks) for size in reversed(WINDOW_SIZES)):
        firsts = list(range(0, num_tasks - size + 1, max(1, size // 3)))
        rng.shuffle(firsts)
        found += [(first, size) for first in firsts]
    return found


class _Window:
    """Consecutive tasks in the order of starts, with the limits that the tasks around them impose."""

    def __init__(self, problem: Problem, schedule: Schedule, first: int, size: int) -> None:
        self.problem = problem
        self.schedule = schedule
        self.lanes = [problem.mode(schedule, task).lane for task in range(len(problem.tasks))]
        order = sorted(range(len(schedule.starts)), key=schedule.starts.__getitem__)
        self.before, self.tasks, self.after = order[:first], sorted(order[first : first + size]), order[first + size :]
        self.ends = {task: schedule.starts[task] + problem.mode(schedule, task).duration for task in self.before}
        """Ends of the tasks before the window."""
        self.last_users: dict[int, int] = {}
        """Per atom, its last user before the window."""
        for task in self.before:
            self.last_users.update(dict.fromkeys(problem.lanes[self.lanes[task]], task))
        self.successors = problem.successors()
        self.chains: dict[int, int] = {}
        """Per task after the window: least time from its start to the end of the schedule."""
        self.next_users: dict[int, int] = {}
        """Per atom, its first user after the window."""
        for task in reversed(self.after):
            self.chains[task] = problem.mode(schedule, task).duration + self._tail(task, self.lanes[task])
            self.next_users.update(dict.fromkeys(problem.lanes[self.lanes[task]], task))
        through = (self._release(task, self.lanes[task]) + chain for task, chain in self.chains.items())
        self.floor = max(*self.ends.values(), *through, 0, 0)
        """Least makespan that the tasks around the window allow."""

    def has_room(self, makespan: int) -> bool:
        """Return whether the tasks of the window can fit into the units x time that the tasks around them leave."""
        sizes, lanes = self.problem.atom_sizes, self.problem.lanes
        needed = sum(
            min(
                mode.duration * sum(sizes[atom] for atom in lanes[mode.lane]) for mode in self.problem.tasks[task].modes
            )
            for task in self.tasks
        )
        left = 0
        for atom, size in enumerate(sizes):
            free_at = self.ends[self.last_users[atom]] if atom in self.last_users else 0
            after = self.chains[self.next_users[atom]] if atom in self.next_users else 0
            left += size * max(0, makespan - free_at - after)
        return self.floor <= makespan and needed <= left

    def search(self, least: int, most: int, *, seed: int, deterministic_time: float, time_limit_s: float) -> Answer:
        """Ask CP-SAT for a makespan from `least` to `most`."""
        problem = self.problem
        place = {task: index for index, task in enumerate(self.tasks)}
        tasks = tuple(
            Task(
                modes=tuple(replace(mode, demands=()) for mode in problem.tasks[task].modes),
                predecessors=tuple(place[other] for other in problem.tasks[task].predecessors if other in place),
            )
            for task in self.tasks
        )
        inside = replace(problem, tasks=tasks, capacities=(), holds=())
        limits = [
            [(self._release(task, mode.lane), self._tail(task, mode.lane)) for mode in problem.tasks[task].modes]
            for task in self.tasks
        ]
        return search_part(
            inside, (least, most), limits, seed=seed, deterministic_time=deterministic_time, time_limit_s=time_limit_s
        )

    def replayed(self, answer: Answer) -> Schedule | None:
        """Return the whole schedule with the order and modes of the answer; None if it exceeds the resources."""
        start_of = dict(zip(self.tasks, answer.starts, strict=True))
        order = [*self.before, *sorted(self.tasks, key=start_of.__getitem__), *self.after]
        modes = list(self.schedule.modes)
        for task, mode in zip(self.tasks, answer.modes, strict=True):
            modes[task] = mode
        starts = replay(self.problem, order, modes)
        if starts is None:
            return None
        makespan = makespan_of(self.problem, starts, modes)
        return Schedule(modes=tuple(modes), starts=tuple(starts), makespan=makespan)

    def _release(self, task: int, lane: int) -> int:
        """Return the earliest start of the task on the lane, after the tasks before the window."""
        earlier = [other for other in self.problem.tasks[task].predecessors if other in self.ends]
        earlier += [self.last_users[atom] for atom in self.problem.lanes[lane] if atom in self.last_users]
        return max((self.ends[other] + self._gap(self.lanes[other], lane) for other in earlier), default=0)

    def _tail(self, task: int, lane: int) -> int:
        """Return the least time from the end of the task on the lane to the end, through the tasks after the window."""
        later = [other for other in self.successors[task] if other in self.chains]
        later += [self.next_users[atom] for atom in self.problem.lanes[lane] if atom in self.next_users]
        return max((self._gap(lane, self.lanes[other]) + self.chains[other] for other in later), default=0)

    def _gap(self, lane: int, other: int) -> int:
        return self.problem.handover if lane != other else 0
