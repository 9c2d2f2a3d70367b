"""Placement of modules on groups of devices: the problem, its schedules, and their check.

    Fleet -> schedule(fleet, choices, order) -> Placement;  violations(fleet, placement) -> [text]

A fleet has equal devices in a row. A module takes an aligned group of them (a group of n devices begins at a multiple
of n) in one of its modes, and keeps it: all its tasks run there, on the units of its mode on each device of the group.
An arc delays a task after another: by nothing if both modules have the same group, else by a time that depends on the
numbers of devices. At every instant, the units in use on a device are at most its own; the memory of all modules on a
device is at most its memory. Times are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A way to run a module."""

    devices: int
    units: int
    """Units in use on each device while a task of the module runs."""
    memory: int
    """Bytes on each device, at all times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Work of a module."""

    module: int
    durations: tuple[int, ...]
    """By mode of the module."""


class Arc(NamedTuple):
    """A task that waits for another."""

    before: int
    after: int
    delays: dict[tuple[int, int], int]
    """By numbers of devices (before, after), if the groups differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Modules, their tasks, and the devices that they share."""

    devices: int
    units: int
    """Units of each device."""
    memory: int | None
    """Bytes of each device; None is no limit."""
    modules: tuple[tuple[Mode, ...], ...]
    tasks: tuple[Task, ...]
    arcs: tuple[Arc, ...]
    """From tasks to later ones: the tasks are in topological order."""


Choice: TypeAlias = tuple[int, int]
"""Mode and first device of a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Choices of all modules, and starts of all tasks."""

    choices: tuple[Choice, ...]
    starts: tuple[int, ...]
    makespan: int


def groups_of(fleet: Fleet, mode: Mode) -> range:
    """Return the first devices that a mode may have."""
    return range(0, fleet.devices - mode.devices + 1, mode.devices)


def duration_of(fleet: Fleet, task: int, choices: Sequence[Choice]) -> int:
    """Return the duration of a task."""
    work = fleet.tasks[task]
    return work.durations[choices[work.module][0]]


def delay_of(fleet: Fleet, arc: Arc, choices: Sequence[Choice]) -> int:
    """Return the time between the end of a task and the start of the one that waits for it."""
    (before, one), (after, other) = (
        (choices[module][1], fleet.modules[module][choices[module][0]].devices)
        for module in (fleet.tasks[arc.before].module, fleet.tasks[arc.after].module)
    )
    return 0 if (before, one) == (after, other) else arc.delays.get((one, other), 0)


def memory_of(fleet: Fleet, choices: Sequence[Choice]) -> list[int]:
    """Return the bytes on every device."""
    held = [0] * fleet.devices
    for modes, (mode, first) in zip(fleet.modules, choices, strict=True):
        for device in range(first, first + modes[mode].devices):
            held[device] += modes[mode].memory
    return held


def fits(fleet: Fleet, choices: Sequence[Choice]) -> bool:
    """Return whether the memory of every device is enough."""
    return fleet.memory is None or max(memory_of(fleet, choices), default=0) <= fleet.memory


def critical_order(fleet: Fleet, choices: Sequence[Choice]) -> list[int]:
    """Return the tasks in an order that starts those with the longest rest of the step first."""
    tails = [0] * len(fleet.tasks)
    by_task: list[list[Arc]] = [[] for _ in fleet.tasks]
    for arc in fleet.arcs:
        by_task[arc.before].append(arc)
    for task in reversed(range(len(fleet.tasks))):
        rest = max((delay_of(fleet, arc, choices) + tails[arc.after] for arc in by_task[task]), default=0)
        tails[task] = rest + duration_of(fleet, task, choices)
    return sorted(range(len(fleet.tasks)), key=lambda task: (-tails[task], task))


def schedule(fleet: Fleet, choices: Sequence[Choice], order: Sequence[int]) -> Placement:
    """Return the schedule that starts the tasks of an order as early as those before it allow, also in their gaps.

    Arguments:
        fleet: the problem.
        choices: mode and first device of every module.
        order: all tasks; none before a task that it waits for.
    """
    waits: list[list[Arc]] = [[] for _ in fleet.tasks]
    for arc in fleet.arcs:
        waits[arc.after].append(arc)
    masks, units = [], []
    for modes, (mode, first) in zip(fleet.modules, choices, strict=True):
        masks.append(((1 << modes[mode].devices) - 1) << first)
        units.append(modes[mode].units)
    starts, ends = [0] * len(fleet.tasks), [0] * len(fleet.tasks)
    placed: list[int] = []
    module_of = [task.module for task in fleet.tasks]
    for task in order:
        module = module_of[task]
        ready = max((ends[arc.before] + delay_of(fleet, arc, choices) for arc in waits[task]), default=0)
        duration = duration_of(fleet, task, choices)
        rivals = [other for other in placed if masks[module_of[other]] & masks[module] and ends[other] > ready]
        for start in sorted({ready, *(ends[other] for other in rivals)}):
            both = [other for other in rivals if starts[other] < start + duration and ends[other] > start]
            if _has_room(fleet, masks, units, module, [(module_of[o], starts[o], ends[o]) for o in both]):
                break
        starts[task], ends[task] = start, start + duration
        if duration:
            placed.append(task)
    return Placement(choices=tuple(choices), starts=tuple(starts), makespan=max(ends, default=0))


def _has_room(
    fleet: Fleet, masks: list[int], units: list[int], module: int, others: list[tuple[int, int, int]]
) -> bool:
    """Return whether a task of a module may run beside all of `others` (module, start, end) while they run."""
    spare = fleet.units - units[module]
    if sum(units[other] for other, _, _ in others) <= spare:
        return True
    for _, instant, _ in others:  # the use of a device grows only when a task starts
        running = [other for other, start, end in others if start <= instant < end]
        shared = masks[module]
        while shared:
            device = shared & -shared
            shared ^= device
            if sum(units[other] for other in running if masks[other] & device) > spare:
                return False
    return True


def violations(fleet: Fleet, placement: Placement) -> list[str]:
    """Return the broken rules of a placement, by another way than `schedule`; empty if it is valid."""
    choices, starts = placement.choices, placement.starts
    if len(choices) != len(fleet.modules) or len(starts) != len(fleet.tasks):
        return [f"it has {len(choices)} modules and {len(starts)} tasks"]
    found = [
        f"module {index} has mode {mode} at device {first}"
        for index, (modes, (mode, first)) in enumerate(zip(fleet.modules, choices, strict=True))
        if not (0 <= mode < len(modes) and first in groups_of(fleet, modes[mode]))
    ]
    if found:
        return found
    ends = [start + duration_of(fleet, task, choices) for task, start in enumerate(starts)]
    if placement.makespan != max(ends, default=0) or min(starts, default=0) < 0:
        found.append(f"its makespan is {placement.makespan}, its last task ends at {max(ends, default=0)}")
    found += [
        f"task {arc.after} starts before task {arc.before} has ended and its output has arrived"
        for arc in fleet.arcs
        if starts[arc.after] < ends[arc.before] + delay_of(fleet, arc, choices)
    ]
    if not fits(fleet, choices):
        found.append(f"a device holds {max(memory_of(fleet, choices))} bytes of {fleet.memory}")
    for instant in set(starts):
        used = [0] * fleet.devices
        for task, work in enumerate(fleet.tasks):
            if starts[task] <= instant < ends[task]:
                mode, first = choices[work.module]
                for device in range(first, first + fleet.modules[work.module][mode].devices):
                    used[device] += fleet.modules[work.module][mode].units
        if max(used) > fleet.units:
            found.append(f"device {used.index(max(used))} uses {max(used)} of {fleet.units} units at {instant}")
    return found
