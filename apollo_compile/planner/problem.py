"""The planning problem: multi-mode resource-constrained project scheduling on lanes.

A task runs once, without interruption, in one of its modes; a mode is a lane and the duration there. A lane is a set
of atoms, and an atom serves one task at a time, so lanes that share an atom exclude each other. Whatever is handed from
one lane to another takes `handover` more: a value for a successor, or an atom for the next user.

(1) one mode    sum_l on[t, l] = 1
(2) precedence  end[p] + handover * (lane[p] != lane[t]) <= start[t]                 for p before t
(3) atoms       the same for s before t, or t before s                               if their lanes share an atom
(4) objective   minimise max_t end[t]

Lane 0 covers every atom and every task has a mode on it: the serial schedule always exists.
This is MRCPSP with unary resources and sequence-dependent setup times (Hartmann, Briskorn, "A survey of variants and
extensions of the RCPSP", EJOR 207, 2010, https://doi.org/10.1016/j.ejor.2009.11.005). Times are integers.

The planner knows nothing of segments, units or buffers; `passes/plan.py` translates.
"""

from __future__ import annotations

from dataclasses import dataclass

from apollo_compile.errors import InvariantError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run a task."""

    lane: int
    duration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Its modes, at most one per lane, and the tasks that end before it starts."""

    modes: tuple[Mode, ...]
    predecessors: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Tasks in a topological order, and the lanes they may run on. Raises `InvariantError` if it is malformed."""

    tasks: tuple[Task, ...]
    lanes: tuple[frozenset[int], ...]
    """Atoms of every lane."""
    atom_sizes: tuple[int, ...]
    """Units behind every atom; rules and bounds weigh atoms with them."""
    handover: int = 0

    def __post_init__(self) -> None:
        everything = frozenset(range(len(self.atom_sizes)))
        if not self.lanes or self.lanes[0] != everything:
            raise InvariantError(
                f"planning problem: lane 0 must cover all atoms {sorted(everything)}; got {self.lanes}"
            )
        if any(not lane or not lane <= everything for lane in self.lanes) or min(self.atom_sizes) < 1:
            raise InvariantError(f"planning problem: lanes {self.lanes} do not fit atoms of sizes {self.atom_sizes}")
        if self.handover < 0:
            raise InvariantError(f"planning problem: handover must not be negative, got {self.handover}")
        for task_id, task in enumerate(self.tasks):
            lanes = [mode.lane for mode in task.modes]
            if (
                0 not in lanes
                or len(set(lanes)) != len(lanes)
                or not all(0 <= lane < len(self.lanes) for lane in lanes)
            ):
                raise InvariantError(
                    f"planning problem: task {task_id} needs lane 0 and distinct known lanes, got {lanes}"
                )
            if any(mode.duration < 1 for mode in task.modes):
                raise InvariantError(f"planning problem: task {task_id} has a duration below 1: {task.modes}")
            if any(not 0 <= predecessor < task_id for predecessor in task.predecessors):
                raise InvariantError(f"planning problem: task {task_id} has a later predecessor: {task.predecessors}")

    def duration(self, task: int, lane: int) -> int | None:
        """Return how long `task` takes on `lane`; None if it has no such mode."""
        for mode in self.tasks[task].modes:
            if mode.lane == lane:
                return mode.duration
        return None

    def successors(self) -> list[list[int]]:
        """Return the direct successors of every task, ascending."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for task_id, task in enumerate(self.tasks):
            for predecessor in dict.fromkeys(task.predecessors):
                found[predecessor].append(task_id)
        return found

    def is_valid(self, schedule: Schedule) -> bool:
        """Return whether the schedule keeps every constraint."""
        return not self.violations(schedule)

    def violations(self, schedule: Schedule) -> tuple[str, ...]:
        """Return one line per constraint that the schedule breaks; compares all pairs of tasks."""
        if not len(schedule.lanes) == len(schedule.starts) == len(self.tasks):
            return (
                f"schedule has {len(schedule.lanes)} lanes, {len(schedule.starts)} starts, {len(self.tasks)} tasks",
            )
        found: list[str] = []
        ends: list[int] = []
        for task_id, (lane, start) in enumerate(zip(schedule.lanes, schedule.starts, strict=True)):
            duration = self.duration(task_id, lane)
            if duration is None:
                found.append(f"(1) task {task_id} has no mode on lane {lane}")
            if start < 0:
                found.append(f"task {task_id} starts at {start}")
            ends.append(start + (duration or 0))

        def ready(before: int, after: int) -> int:
            return ends[before] + (self.handover if schedule.lanes[before] != schedule.lanes[after] else 0)

        for task_id, task in enumerate(self.tasks):
            for other in task.predecessors:
                if ready(other, task_id) > schedule.starts[task_id]:
                    found.append(f"(2) task {task_id} starts at {schedule.starts[task_id]}, not ready from {other}")
            for other in range(task_id):
                shared = self.lanes[schedule.lanes[other]] & self.lanes[schedule.lanes[task_id]]
                if (
                    shared
                    and ready(other, task_id) > schedule.starts[task_id]
                    and ready(task_id, other) > schedule.starts[other]
                ):
                    found.append(f"(3) tasks {other} and {task_id} collide on atoms {sorted(shared)}")
        if schedule.makespan != max(ends, default=0):
            found.append(f"(4) makespan is {max(ends, default=0)}, not {schedule.makespan}")
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Lane and start of every task."""

    lanes: tuple[int, ...]
    starts: tuple[int, ...]
    makespan: int
