"""The planning problem: multi-mode resource-constrained project scheduling on lanes.

A task runs once, without interruption, in one of its modes. A mode is a lane and the duration there, and may have
demands for resources. A lane is a set of atoms (groups of units), and an atom runs one task at a time, so lanes that
share an atom exclude each other. A hand-over from one lane to another takes `handover` more time: of a value to a
successor, or of an atom to its next user.

(1) one mode       sum_m on[t, m] = 1
(2) precedence     end[p] + handover * (lane[p] != lane[t]) <= start[t]              for p before t
(3) atoms          the same for s before t, or t before s                            if their lanes share an atom
(4) renewable      sum of demands[k] of the tasks that run, and of the amounts held  <= capacities[k], at every instant
(5) objective      minimise max_t end[t]

A `ResourceHold` is an amount of a renewable resource that is in use from the start of a task until its last reader has
ended: the memory of a value. An amount that is in use only while the task runs (workspace, bandwidth) is a demand.

A lane without atoms, such as that of a network, excludes no other. Tasks that may run there are ordered by precedence.

The first mode of every task is its reference mode. The serial schedule runs all tasks in their reference modes, one
after the other. If there are atoms, lane 0 covers all of them, and reference modes are on it.
This is MRCPSP (Talbot 1982, https://doi.org/10.1287/mnsc.28.10.1197) with unary resources, sequence-dependent setup
times and variable-length holdings (Hartmann, Briskorn, "A survey of variants and extensions of the RCPSP", EJOR 207,
2010, https://doi.org/10.1016/j.ejor.2009.11.005). Times and amounts are integers.

Interference is not a constraint: it makes the execution of a schedule longer, which `simulate.py` predicts.

The planner does not know segments and buffers; `passes/plan.py` translates them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionMode:
    """One way to run a task."""

    lane: int = 0
    duration: int
    demands: tuple[int, ...] = ()
    """Amount per renewable resource while the task runs; empty means 0 of all."""
    memory_share: float = 0.0
    """Share of the duration in which the task waits for memory, 0 to 1; the rest is arithmetic."""

    def demand(self, resource: int) -> int:
        """Return the demand for a renewable resource."""
        return self.demands[resource] if self.demands else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task: its modes, the reference mode first, and the tasks that end before it starts."""

    modes: tuple[ExecutionMode, ...]
    predecessors: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceHold:
    """`amount` of a renewable resource, from the start of `task` until it and all readers have ended."""

    resource: int
    amount: int
    task: int
    readers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interference:
    """Slowdown factors of concurrent tasks, at least 1.

    `slowdown[a][b]` is the factor of a task of kind a beside a task of kind b; kind 0 is arithmetic, kind 1 is memory.
    """

    slowdown: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))

    def factor(self, own: float, other: float) -> float:
        """Return the slowdown of a task with memory share `own` beside a task with memory share `other`."""
        (plain_plain, plain_memory), (memory_plain, memory_memory) = self.slowdown
        beside_plain = plain_plain + (memory_plain - plain_plain) * own
        beside_memory = plain_memory + (memory_memory - plain_memory) * own
        return beside_plain + (beside_memory - beside_plain) * other


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Tasks in a topological order, and the lanes and resources they share.

    Lane 0 covers all atoms, and the first mode of every task is on it; durations are at least 1; a hold has distinct
    tasks. `passes/plan.py` makes it so, from products that are checked.
    """

    tasks: tuple[Task, ...]
    lanes: tuple[frozenset[int], ...] = (frozenset(),)
    """Atoms of every lane."""
    atom_sizes: tuple[int, ...] = ()
    """Number of units of every atom; rules and bounds weight atoms with it."""
    handover: int = 0
    capacities: tuple[int, ...] = ()
    """Capacity of every renewable resource."""
    holds: tuple[ResourceHold, ...] = ()
    interference: Interference = Interference()

    def successors(self) -> list[list[int]]:
        """Return the direct successors of every task, ascending."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for task_id, task in enumerate(self.tasks):
            for predecessor in dict.fromkeys(task.predecessors):
                found[predecessor].append(task_id)
        return found

    def held(self, task: int, resource: int) -> int:
        """Return the amount of a renewable resource that a task begins to hold."""
        return sum(hold.amount for hold in self.holds if (hold.task, hold.resource) == (task, resource))

    def fitting_modes(self, task: int) -> list[int]:
        """Return the modes of a task that fit the capacities, beside the amounts that the task begins to hold."""
        left = [capacity - self.held(task, resource) for resource, capacity in enumerate(self.capacities)]
        return [
            index
            for index, mode in enumerate(self.tasks[task].modes)
            if all(mode.demand(resource) <= amount for resource, amount in enumerate(left))
        ]

    def mode(self, schedule: TaskSchedule, task: int) -> ExecutionMode:
        """Return the mode in which the schedule runs the task."""
        return self.tasks[task].modes[schedule.modes[task]]

    def is_valid(self, schedule: TaskSchedule) -> bool:
        """Return whether the schedule satisfies every constraint."""
        return not self.violations(schedule)

    def violations(self, schedule: TaskSchedule) -> tuple[str, ...]:
        """Return one line per constraint that the schedule violates."""
        if not len(schedule.modes) == len(schedule.starts) == len(self.tasks):
            return (
                f"schedule has {len(schedule.modes)} modes, {len(schedule.starts)} starts, {len(self.tasks)} tasks",
            )
        found = [
            f"(1) task {task} has no mode {mode}"
            for task, mode in enumerate(schedule.modes)
            if not 0 <= mode < len(self.tasks[task].modes)
        ]
        if found:
            return tuple(found)
        found += [f"task {task} starts at {start}" for task, start in enumerate(schedule.starts) if start < 0]
        found += self._order_violations(schedule)
        found += self.resource_violations(schedule)
        last = max(self.ends(schedule), default=0)
        if schedule.makespan != last:
            found.append(f"(5) makespan is {last}, not {schedule.makespan}")
        return tuple(found)

    def ends(self, schedule: TaskSchedule) -> list[int]:
        """Return the end of every task."""
        return [start + self.mode(schedule, task).duration for task, start in enumerate(schedule.starts)]

    def _order_violations(self, schedule: TaskSchedule) -> Iterator[str]:
        """Compare neighbours on every atom: if they satisfy (3), all pairs do, because durations are positive."""
        ends = self.ends(schedule)
        lanes = [self.mode(schedule, task).lane for task in range(len(self.tasks))]

        def ready(before: int, after: int) -> int:
            return ends[before] + (self.handover if lanes[before] != lanes[after] else 0)

        for task_id, task in enumerate(self.tasks):
            for other in task.predecessors:
                if ready(other, task_id) > schedule.starts[task_id]:
                    yield f"(2) task {task_id} starts at {schedule.starts[task_id]}, not ready from {other}"
        collisions: dict[tuple[int, int], list[int]] = {}
        for atom in range(len(self.atom_sizes)):
            users = [task for task in range(len(self.tasks)) if atom in self.lanes[lanes[task]]]
            users.sort(key=lambda task: schedule.starts[task])
            for before, after in itertools.pairwise(users):
                if ready(before, after) > schedule.starts[after]:
                    collisions.setdefault((before, after), []).append(atom)
        for (before, after), atoms in collisions.items():
            yield f"(3) tasks {before} and {after} collide on atoms {atoms}"

    def resource_violations(self, schedule: TaskSchedule) -> Iterator[str]:
        """Yield one line per resource whose capacity the schedule exceeds."""
        for resource, capacity in enumerate(self.capacities):
            peak = self.peak(schedule, resource)
            if peak > capacity:
                yield f"(4) {peak} of renewable resource {resource} in use, there are {capacity}"

    def peak(self, schedule: TaskSchedule, resource: int) -> int:
        """Return the largest amount of a renewable resource that is in use at one instant."""
        ends = self.ends(schedule)
        changes: list[tuple[int, int]] = []
        for task in range(len(self.tasks)):
            if demand := self.mode(schedule, task).demand(resource):
                changes += [(schedule.starts[task], demand), (ends[task], -demand)]
        for hold in self.holds:
            if hold.resource == resource:
                last = max(ends[task] for task in (hold.task, *hold.readers))
                changes += [(schedule.starts[hold.task], hold.amount), (last, -hold.amount)]
        in_use = peak = 0
        for _, change in sorted(changes):  # at one instant, releases come before acquisitions
            in_use += change
            peak = max(peak, in_use)
        return peak


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSchedule:
    """Mode (its index among the task's modes) and start of every task."""

    modes: tuple[int, ...]
    starts: tuple[int, ...]
    makespan: int


MAKESPAN = operator.attrgetter("makespan")
"""Key by which the shorter of schedules is found."""
