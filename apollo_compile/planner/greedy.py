"""A portfolio of list schedules, computed in a fraction of a second.

    greedy_schedules(problem) -> schedules, the serial one first

A list scheduler appends one ready task at a time. Each `_Rule` of the portfolio fixes
    lanes            all, those of one split and lane 0, or those of one split alone
    next task        the one that can start first, or the one of highest priority; priority = longest chain after it,
                     with durations on lane 0, of the slowest mode, or of the mode with the least units x time
    lane of a task   least  end + greed * (units x time) / all units:  greed 0 is earliest finish, a large one favours
                     efficiency; the only ready task instead goes to the lane on which the whole chain after it would
                     end first, so that one hand-over is weighed against its gain for the chain
Hand-overs are part of every start, so a task stays on the lane of a predecessor where that ends earlier, and in ties.
On a lane, a task runs in its fastest mode there. Fewer rules run for more tasks, so the total time is bounded.

Guarantees: every schedule respects precedence and atoms; renewable resources are ignored. The same problem gives the
same schedules.
Leaves improvement to `annealing.py`, and the distance from the optimum to `bounds.py`.
Source: Kolisch, Hartmann, "Heuristic algorithms for the RCPSP", 1999, https://doi.org/10.1007/978-1-4615-5533-9_7
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from apollo_compile.planner.problem import Problem, TaskSchedule
from apollo_compile.planner.simulate import Simulator, serial_schedule, tail_lengths

MAX_READY = 8
"""Ready tasks that a list scheduler considers, best priority first."""
MAX_PLACEMENTS = 8_000
"""Limit of rules x tasks, which bounds the time."""

_CHOICES = ((True, 1e6), (True, 4.0), (False, 2.0), (True, 1.0))
"""by_time and greed of the portfolio's rules, ordered by how often each was best."""


def greedy_schedules(problem: Problem) -> tuple[TaskSchedule, ...]:
    """Return distinct schedules: the serial one, then one per rule of the portfolio."""
    serial = serial_schedule(problem)
    if len(problem.tasks) < 2 or not problem.atom_sizes:
        return (serial,)
    simulator = Simulator(problem)
    options = _Options(problem, simulator)
    found = {serial: None}
    for rule in itertools.islice(_portfolio(problem, simulator), max(1, MAX_PLACEMENTS // len(problem.tasks))):
        found.setdefault(_ListSchedule(simulator, options, rule).complete())
    return tuple(found)


# ------------------------------------------------------------------------------------------------- list schedules


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """Decision rule of one list scheduler."""

    lanes: tuple[int, ...]
    """Lanes to use; a task that has no mode on any of them runs on lane 0."""
    priority: tuple[int, ...]
    """Per task; larger goes first."""
    by_time: bool
    """Whether the task that can start first goes first, regardless of priority."""
    greed: float
    """Weight of units x time against the end."""


def _portfolio(problem: Problem, simulator: Simulator) -> Iterator[_Rule]:
    areas = _areas(problem)
    wide = [task.modes[0].duration for task in problem.tasks]
    slow = [max(mode.duration for mode in task.modes) for task in problem.tasks]
    frugal = [
        task.modes[min(fastest.values(), key=row.__getitem__)].duration
        for task, fastest, row in zip(problem.tasks, simulator.mode_by_lane, areas, strict=True)
    ]
    priorities: dict[tuple[int, ...], None] = {}
    for durations in (wide, slow, frugal):
        tails = tail_lengths(simulator.successors, durations)
        priorities.setdefault(tuple(tail + duration for tail, duration in zip(tails, durations, strict=True)))
    free = _lanes_without_atoms(problem)
    for split in splits(problem):
        yield _Rule(lanes=(*split, *free), priority=next(iter(priorities)), by_time=True, greed=0.0)
    families = lane_families(problem)
    for by_time, greed in _CHOICES:
        for priority in priorities:
            for lanes in families:
                yield _Rule(lanes=lanes, priority=priority, by_time=by_time, greed=greed)


def lane_families(problem: Problem) -> list[tuple[int, ...]]:
    """Return sets of lanes to plan with: all, and lane 0 with the lanes of each split and those without atoms."""
    free = _lanes_without_atoms(problem)
    families = ((0, *split, *free) for split in splits(problem))
    return list(dict.fromkeys([tuple(range(len(problem.lanes))), *families]))


def _lanes_without_atoms(problem: Problem) -> tuple[int, ...]:
    return tuple(lane for lane, atoms in enumerate(problem.lanes) if lane and not atoms)


def splits(problem: Problem) -> list[tuple[int, ...]]:
    """Return the sets of at least two narrow lanes that partition the atoms of all narrow lanes."""
    narrow = range(1, len(problem.lanes))
    everything = frozenset[int]().union(*problem.lanes[1:])

    def complete(chosen: tuple[int, ...], left: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield tuple(sorted(chosen))
        for lane in narrow if left else ():
            if min(left) in problem.lanes[lane] <= left:
                yield from complete((*chosen, lane), left - problem.lanes[lane])

    return sorted(split for split in complete((), everything) if len(split) > 1)


def _areas(problem: Problem) -> list[list[float]]:
    """Return, per task and mode, its share of all units x time."""
    total = sum(problem.atom_sizes)
    shares = [sum(problem.atom_sizes[atom] for atom in lane) / total for lane in problem.lanes]
    return [[shares[mode.lane] * mode.duration for mode in task.modes] for task in problem.tasks]


class _Options:
    """Data that all rules of a portfolio share."""

    def __init__(self, problem: Problem, simulator: Simulator) -> None:
        areas = _areas(problem)
        lane_tails = [
            tail_lengths(
                simulator.successors,
                [
                    task.modes[fastest.get(lane, 0)].duration
                    for task, fastest in zip(problem.tasks, simulator.mode_by_lane, strict=True)
                ],
            )
            for lane in range(len(problem.lanes))
        ]
        self.atoms = [sorted(lane) for lane in problem.lanes]
        self.sharing = [[other for other, atoms in enumerate(problem.lanes) if atoms & own] for own in problem.lanes]
        """Per lane, the lanes with which it shares atoms; itself is one of them."""
        self.of_task = [
            [
                (lane, mode, problem.tasks[task].modes[mode].duration, areas[task][mode], lane_tails[lane][task])
                for lane, mode in sorted(fastest.items())
            ]
            for task, fastest in enumerate(simulator.mode_by_lane)
        ]
        """Per task: lane, mode, duration, share of units x time, and the length of the chain after it on that lane."""


class _ListSchedule:
    """A partial schedule, built by one rule."""

    def __init__(self, simulator: Simulator, options: _Options, rule: _Rule) -> None:
        num_tasks = len(options.of_task)
        self.simulator, self.options, self.rule = simulator, options, rule
        self.order: list[int] = []
        self.ends, self.lanes, self.modes = [0] * num_tasks, [0] * num_tasks, [0] * num_tasks
        self.free, self.user = [-simulator.handover] * simulator.num_atoms, [-1] * simulator.num_atoms
        self.available = [0] * len(options.atoms)
        """Per lane, the time at which all its atoms are free and handed over."""
        self.waits_for = [len(predecessors) for predecessors in simulator.predecessors]
        self.ready: list[tuple[int, int]] = []
        """(-priority, task), ascending: best first."""
        self.known: dict[int, list[tuple[int, int, int, int, float, float]]] = {}
        """Per ready task: (lane, earliest start by predecessors, mode, duration, cost of a start at 0, cost of a start
        at 0 if it is the only ready task)."""
        for task, count in enumerate(self.waits_for):
            if not count:
                self.make_ready(task)

    def complete(self) -> TaskSchedule:
        """Append all tasks, and return the schedule."""
        limit = MAX_READY if self.rule.by_time else 1
        while self.ready:
            options = [self.best_option(task, len(self.ready) == 1) for _, task in self.ready[:limit]]
            self.place(*min(options, key=_start))
        return self.simulator.replay(self.order, self.modes)

    def make_ready(self, task: int) -> None:
        predecessors, lanes, ends = self.simulator.predecessors[task], self.lanes, self.ends
        handover, rule = self.simulator.handover, self.rule
        main_lane = max((ends[other], -other, lanes[other]) for other in predecessors)[2] if predecessors else -1
        found = []
        options = self.options.of_task[task]
        allowed = rule.lanes if any(option[0] in rule.lanes for option in options) else (0,)
        for lane, mode, duration, area, tail in options:
            if lane in allowed:
                start = 0
                for other in predecessors:
                    handed_over = ends[other] if lanes[other] == lane else ends[other] + handover
                    if handed_over > start:
                        start = handed_over
                option = (lane, start, mode, duration, duration + rule.greed * area, float(duration + tail))
                found.append((lane != main_lane, option))
        # the lane that needs no hand-over of the last value comes first and wins ties
        self.known[task] = [option for _, option in sorted(found)]
        bisect.insort(self.ready, (-rule.priority[task], task))

    def best_option(self, task: int, alone: bool) -> tuple[int, int, int, int, int]:
        """Return (start, task, lane, mode, duration) on the best lane by the rule."""
        available = self.available
        least = math.inf
        best = (0, task, 0, 0, 0)
        for lane, from_predecessors, mode, duration, cost, cost_alone in self.known[task]:
            start = available[lane]
            if from_predecessors > start:
                start = from_predecessors
            value = start + (cost_alone if alone else cost)
            if value < least:
                least = value
                best = (start, task, lane, mode, duration)
        return best

    def place(self, start: int, task: int, lane: int, mode: int, duration: int) -> None:
        """Append a ready task."""
        free, user, handover = self.free, self.user, self.simulator.handover
        end = start + duration
        del self.ready[bisect.bisect_left(self.ready, (-self.rule.priority[task], task))]
        self.order.append(task)
        self.lanes[task], self.modes[task], self.ends[task] = lane, mode, end
        for atom in self.options.atoms[lane]:
            free[atom], user[atom] = end, lane
        for other in self.options.sharing[lane]:
            self.available[other] = max(
                [free[atom] if user[atom] == other else free[atom] + handover for atom in self.options.atoms[other]]
            )
        for after in self.simulator.successors[task]:
            self.waits_for[after] -= 1
            if not self.waits_for[after]:
                self.make_ready(after)


def _start(option: tuple[int, int, int, int, int]) -> int:
    return option[0]
