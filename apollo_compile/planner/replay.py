"""Replay with renewable resources: start the tasks of an order, in given modes, as early as all limits allow.

    replay(problem, order, modes) -> start of every task, or None if one never fits
    left_shifted(problem, starts, modes) -> Schedule

It serves the few schedules that a solver finds. `simulate.Simulator` replays without renewable resources, fast enough
for the moves of a local search.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from apollo_compile.planner.problem import Hold, Problem, Schedule


def left_shifted(problem: Problem, starts: Sequence[int], modes: Sequence[int]) -> Schedule:
    """Return the schedule with every task as early as order and modes allow; it is valid and not longer."""
    order = sorted(range(len(starts)), key=starts.__getitem__)
    replayed = replay(problem, order, modes)
    assert replayed is not None  # at its given start, a task always fits
    return Schedule(modes=tuple(modes), starts=tuple(replayed), makespan=makespan_of(problem, replayed, modes))


def makespan_of(problem: Problem, starts: Sequence[int], modes: Sequence[int]) -> int:
    """Return the end of the last task."""
    ends = (start + problem.tasks[task].modes[modes[task]].duration for task, start in enumerate(starts))
    return max(ends, default=0)


def replay(problem: Problem, order: Sequence[int], modes: Sequence[int]) -> list[int] | None:
    """Return the start of every task, as early as the tasks before it in the order allow; None if one never fits.

    With renewable resources no task starts before the previous one in the order, so the amounts in use only fall after
    the last start. Replaying a valid schedule in the order of its starts makes no task later: by induction, at its
    start no amount is in use that is not in use in that schedule too.
    """
    starts, ends = [0] * len(order), [0] * len(order)
    lanes = [task.modes[mode].lane for task, mode in zip(problem.tasks, modes, strict=True)]
    users: dict[int, int] = {}
    """Last task on every atom."""
    stock = _Stock(problem) if problem.capacities else None
    floor = 0
    for task in order:
        lane, start = lanes[task], floor
        for other in problem.tasks[task].predecessors:
            start = max(start, ends[other] + (problem.handover if lanes[other] != lane else 0))
        for atom in problem.lanes[lane]:
            if atom in users:
                start = max(start, ends[users[atom]] + (problem.handover if lanes[users[atom]] != lane else 0))
            users[atom] = task
        if stock:
            fits_at = stock.wait(task, modes[task], start)
            if fits_at is None:
                return None
            start = floor = fits_at
        starts[task] = start
        ends[task] = start + problem.tasks[task].modes[modes[task]].duration
        if stock:
            stock.take(task, modes[task], ends)
    return starts


class _Stock:
    """Available amounts of the renewable resources while tasks are appended in the order of their starts."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.left = list(problem.capacities)
        self.due: list[tuple[int, int, int]] = []
        """Heap of (instant, resource, amount) of future releases."""
        self.holds: list[list[Hold]] = [[] for _ in problem.tasks]
        """Per task, the holds that begin with it."""
        self.awaits: list[list[int]] = [[] for _ in problem.tasks]
        """Per task, the holds that end with it or later."""
        self.missing: list[int] = []
        """Per hold, the number of its tasks that are not appended yet."""
        for index, hold in enumerate(problem.holds):
            awaited = dict.fromkeys((hold.task, *hold.readers))
            self.holds[hold.task].append(hold)
            self.missing.append(len(awaited))
            for task in awaited:
                self.awaits[task].append(index)

    def wait(self, task: int, mode: int, earliest: int) -> int | None:
        """Return the first instant from `earliest` on at which the resources suffice for the task; None if never."""
        needs = self._needs(task, mode)
        instant = earliest
        while self.due and (self.due[0][0] <= instant or any(a > b for a, b in zip(needs, self.left, strict=True))):
            released_at, resource, amount = heapq.heappop(self.due)
            self.left[resource] += amount
            instant = max(instant, released_at)
        return None if any(a > b for a, b in zip(needs, self.left, strict=True)) else instant

    def take(self, task: int, mode: int, ends: Sequence[int]) -> None:
        """Take the demands of the task until it ends, and its holds until their last readers end."""
        for resource, amount in enumerate(self._needs(task, mode)):
            self.left[resource] -= amount
        for resource, demand in enumerate(self.problem.tasks[task].modes[mode].demands):
            heapq.heappush(self.due, (ends[task], resource, demand))
        for index in self.awaits[task]:
            self.missing[index] -= 1
            if not self.missing[index]:
                hold = self.problem.holds[index]
                last = max(ends[other] for other in (hold.task, *hold.readers))
                heapq.heappush(self.due, (last, hold.resource, hold.amount))

    def _needs(self, task: int, mode: int) -> list[int]:
        needs = list(self.problem.tasks[task].modes[mode].demands) or [0] * len(self.left)
        for hold in self.holds[task]:
            needs[hold.resource] += hold.amount
        return needs
