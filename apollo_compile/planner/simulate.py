"""Timing: replay an order of tasks without interference, and predict the execution of a schedule with it.

    Simulator(problem).replay(order, modes) -> TaskSchedule
    execute(problem, schedule) -> Execution

Replay. Tasks are appended one after the other, each as early as its predecessors, its atoms and the hand-overs allow.
The result is semi-active: no task can start earlier without changing the order on an atom. Some order and choice of
modes replays to an optimal schedule of a problem without renewable resources, so it is enough to search over orders and
modes. Renewable resources are ignored: `Problem.resource_violations` checks them.
Source: Sprecher, Kolisch, Drexl, "Semi-active, active, and non-delay schedules", EJOR 80, 1995,
https://doi.org/10.1016/0377-2217(93)E0294-8

Execute. Predict starts and ends if concurrent tasks slow each other. A task starts when its predecessors and the
previous tasks on its atoms have ended, plus hand-overs. While it runs it progresses at

    rate[i]  =  1 / (1 + sum over j that run on other lanes of  w[i, j] * (slow(m[i], m[j]) - 1))
    w[i, j]  =  units of the lane of j / units outside the lane of i
    slow     =  bilinear in the two memory shares, between the corners of `problem.interference`

so the weights of neighbours that fill the rest of the device add up to 1. Rates change only when a task starts or ends;
these times are rounded up to integers, and gaps for hand-overs are kept exactly. With renewable resources, a task also
waits for all tasks that end before its start in the schedule: then only tasks that overlap in the schedule can overlap
here (interval orders), so no peak grows. Without interference, no task is later than in the schedule, and if no task of
the schedule could start earlier, the result equals it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apollo_compile.planner.problem import Problem, Task, TaskSchedule

PROGRESS_TOLERANCE = 1e-6
"""A task has ended when less work than this is left: rates are floating point, and no task is shorter than 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Starts and ends of the tasks of a schedule with interference."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    makespan: int


@dataclass(slots=True)
class Partial:
    """A schedule to which tasks are appended."""

    starts: list[int]
    ends: list[int]
    lanes: list[int]
    """Per task, its lane; 0 if it is not appended yet."""
    free: list[int]
    user: list[int]
    """Per atom: the end and the lane of the last task on it."""


class Simulator:
    """Replays orders of tasks of one problem; keeps no state between replays."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        atoms = [tuple(sorted(lane)) for lane in problem.lanes]
        self.choices = [[(mode.lane, atoms[mode.lane], mode.duration) for mode in task.modes] for task in problem.tasks]
        """Per task and mode: lane, its atoms, duration."""
        self.mode_by_lane = [_fastest_by_lane(task) for task in problem.tasks]
        """Per task: its fastest mode on every lane where it has a mode."""
        self.predecessors = [tuple(dict.fromkeys(task.predecessors)) for task in problem.tasks]
        self.successors = problem.successors()
        self.shortest = [min(mode.duration for mode in task.modes) for task in problem.tasks]
        self.tails = tail_lengths(self.successors, self.shortest)
        """Least time from the end of a task to the end of the schedule."""
        self.handover = problem.handover
        self.num_atoms = len(problem.atom_sizes)

    def replay(self, order: Sequence[int], modes: Sequence[int]) -> TaskSchedule:
        """Return the semi-active schedule; `order` is topological."""
        partial = self.begin()
        self.extend(partial, order, modes, math.inf)
        return TaskSchedule(modes=tuple(modes), starts=tuple(partial.starts), makespan=max(partial.ends, default=0))

    def begin(self) -> Partial:
        """Return an empty schedule."""
        num_tasks = len(self.choices)
        return Partial(
            starts=[0] * num_tasks,
            ends=[0] * num_tasks,
            lanes=[0] * num_tasks,
            free=[-self.handover] * self.num_atoms,
            user=[-1] * self.num_atoms,
        )

    def extend(self, partial: Partial, tasks: Sequence[int], modes: Sequence[int], limit: float) -> bool:
        """Append tasks in place; return False as soon as it is certain that the makespan exceeds the limit."""
        choices, predecessors, tails, handover = self.choices, self.predecessors, self.tails, self.handover
        starts, ends, lanes, free, user = partial.starts, partial.ends, partial.lanes, partial.free, partial.user
        for task in tasks:
            lane, atoms, duration = choices[task][modes[task]]
            start = 0
            for predecessor in predecessors[task]:
                ready = ends[predecessor]
                if lanes[predecessor] != lane:
                    ready += handover
                if ready > start:
                    start = ready
            for atom in atoms:
                ready = free[atom]
                if user[atom] != lane:
                    ready += handover
                if ready > start:
                    start = ready
            end = start + duration
            if end + tails[task] > limit:
                return False
            starts[task] = start
            ends[task] = end
            lanes[task] = lane
            for atom in atoms:
                free[atom] = end
                user[atom] = lane
        return True


def execute(problem: Problem, schedule: TaskSchedule) -> Execution:
    """Predict the execution of a valid schedule with interference; see the top of this file."""
    modes = [problem.mode(schedule, task) for task in range(len(problem.tasks))]
    total = sum(problem.atom_sizes)
    units = [sum(problem.atom_sizes[atom] for atom in lane) for lane in problem.lanes]

    def rate(task: int, running: Iterable[int]) -> float:
        mode, slowdown = modes[task], 1.0
        outside = total - units[mode.lane]
        for other in running if outside else ():
            if modes[other].lane != mode.lane:
                weight = units[modes[other].lane] / outside
                slowdown += weight * (problem.interference.factor(mode.memory_share, modes[other].memory_share) - 1)
        return 1 / slowdown

    gaps = _gaps(problem, schedule)
    followers: list[list[int]] = [[] for _ in modes]
    for task, before in enumerate(gaps):
        for other in before:
            followers[other].append(task)
    missing = [len(before) for before in gaps]
    starts, ends = [0] * len(modes), [0] * len(modes)
    ready_at = {task: 0 for task, count in enumerate(missing) if not count}
    left: dict[int, float] = {}
    """Remaining work of the running tasks."""
    now = 0
    while ready_at or left:
        for task in [task for task, ready in ready_at.items() if ready <= now]:
            del ready_at[task]
            starts[task] = now
            left[task] = float(modes[task].duration)
        rates = {task: rate(task, left) for task in left}
        steps = [math.ceil((work - PROGRESS_TOLERANCE) / rates[task]) for task, work in left.items()]
        step = max(1, min([*steps, *(ready - now for ready in ready_at.values())]))
        now += step
        for task in list(left):
            left[task] -= step * rates[task]
            if left[task] < PROGRESS_TOLERANCE:
                del left[task]
                ends[task] = now
                for later in followers[task]:
                    missing[later] -= 1
                    if not missing[later]:
                        ready_at[later] = max(ends[other] + gap for other, gap in gaps[later].items())
    return Execution(starts=tuple(starts), ends=tuple(ends), makespan=now)


def serial_schedule(problem: Problem) -> TaskSchedule:
    """Return the schedule that runs every task in its reference mode, one after the other in the given order."""
    ends = list(itertools.accumulate(task.modes[0].duration for task in problem.tasks))
    return TaskSchedule(
        modes=(0,) * len(ends), starts=(0, *ends[:-1]) if ends else (), makespan=ends[-1] if ends else 0
    )


def tail_lengths(successors: Sequence[Sequence[int]], durations: Sequence[int]) -> list[int]:
    """Return, per task, the longest chain of durations after it, its own excluded."""
    tails = [0] * len(durations)
    for task in reversed(range(len(durations))):
        tails[task] = max((durations[after] + tails[after] for after in successors[task]), default=0)
    return tails


def _fastest_by_lane(task: Task) -> dict[int, int]:
    found: dict[int, int] = {}
    for index, mode in enumerate(task.modes):
        if mode.lane not in found or mode.duration < task.modes[found[mode.lane]].duration:
            found[mode.lane] = index
    return found


def _gaps(problem: Problem, schedule: TaskSchedule) -> list[dict[int, int]]:
    """Return, per task, the tasks that it waits for, with the gap between their end and its start."""
    lanes = [problem.mode(schedule, task).lane for task in range(len(problem.tasks))]
    found: list[dict[int, int]] = [{} for _ in lanes]
    user: dict[int, int] = {}
    for task in sorted(range(len(lanes)), key=lambda task: schedule.starts[task]):
        before = [
            *problem.tasks[task].predecessors,
            *(user[atom] for atom in sorted(problem.lanes[lanes[task]]) if atom in user),
        ]
        for other in before:
            found[task][other] = problem.handover if lanes[other] != lanes[task] else 0
        user.update(dict.fromkeys(problem.lanes[lanes[task]], task))
    if problem.capacities:
        _keep_intervals_apart(problem, schedule, found)
    return found


def _keep_intervals_apart(problem: Problem, schedule: TaskSchedule, gaps: list[dict[int, int]]) -> None:
    """Make every task wait for all tasks that end before its start in the schedule; skip waits that others imply."""
    ends = problem.ends(schedule)
    by_end = sorted(range(len(ends)), key=lambda task: ends[task])
    sorted_ends = [ends[task] for task in by_end]
    latest_starts = list(itertools.accumulate((schedule.starts[task] for task in by_end), max))
    for task, start in enumerate(schedule.starts):
        last = bisect.bisect_right(sorted_ends, start)
        first = bisect.bisect_right(sorted_ends, latest_starts[last - 1]) if last else 0
        for other in by_end[first:last]:
            gaps[task].setdefault(other, 0)
