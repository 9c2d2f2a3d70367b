"""Modules on groups of devices: the problem, its schedules, and their check.

    Scheduler(fleet).schedule(choices, order) -> FleetPlacement;  violations(fleet, placement) -> [text]

A fleet has equal devices in a row. A module takes an aligned group of them (a group of n devices begins at a multiple
of n) in one of its modes, and keeps it: all its tasks run there, on the units of its mode on each device of the group.
An arc lets a task wait for the end of another. At every instant, the units in use on a device are at most its own; the
memory of all modules on a device is at most its memory. Times are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementMode:
    """A way to run a module."""

    devices: int
    units: int
    """Units in use on each device while a task of the module runs."""
    memory: int
    """Bytes on each device, at all times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementTask:
    """Work of a module."""

    module: int
    durations: tuple[int, ...]
    """Durations by mode of the module."""
    label: tuple[str, ...] = ()
    """Words by which its owner finds it."""


class Arc(NamedTuple):
    """A task that waits for another."""

    before: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Modules, their tasks, and the devices that they share."""

    devices: int
    units: int
    """Units of each device."""
    memory: int | None
    """Bytes of each device; None is no limit."""
    modules: tuple[tuple[PlacementMode, ...], ...]
    tasks: tuple[PlacementTask, ...]
    arcs: tuple[Arc, ...]
    """Arcs from tasks to later ones: the tasks are in topological order."""


Choice: TypeAlias = tuple[int, int]
"""Mode and first device of a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlacement:
    """Choices of all modules, and starts of all tasks."""

    choices: tuple[Choice, ...]
    starts: tuple[int, ...]
    makespan: int


def groups_of(fleet: Fleet, mode: PlacementMode) -> range:
    """Return the first devices that a mode may have."""
    return range(0, fleet.devices - mode.devices + 1, mode.devices)


def duration_of(fleet: Fleet, task: int, choices: Sequence[Choice]) -> int:
    """Return the duration of a task."""
    work = fleet.tasks[task]
    return work.durations[choices[work.module][0]]


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


class Scheduler:
    """Schedules of one fleet; their common parts are computed once."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._before: list[list[int]] = [[] for _ in fleet.tasks]
        self._after: list[list[int]] = [[] for _ in fleet.tasks]
        for arc in fleet.arcs:
            self._before[arc.after].append(arc.before)
            self._after[arc.before].append(arc.after)

    def critical_order(self, choices: Sequence[Choice]) -> list[int]:
        """Return the tasks in an order that starts those with the longest rest of the step first."""
        fleet = self.fleet
        tails = [0] * len(fleet.tasks)
        for task in reversed(range(len(fleet.tasks))):
            tails[task] = max((tails[other] for other in self._after[task]), default=0)
            tails[task] += duration_of(fleet, task, choices)
        return sorted(range(len(tails)), key=lambda task: (-tails[task], task))

    def order_of(self, starts: Sequence[int]) -> list[int]:
        """Return the tasks by start, each after those that it waits for."""
        found = list(starts)
        for task, before in enumerate(self._before):
            found[task] = max(found[task], *(found[other] for other in before), 0)
        return sorted(range(len(found)), key=lambda task: (found[task], task))

    def settle(self, placement: FleetPlacement) -> FleetPlacement:
        """Return the placement with all tasks as early as their order allows."""
        while True:
            again = self.schedule(placement.choices, self.order_of(placement.starts))
            if again.starts == placement.starts:
                return again
            placement = again

    def best_of_orders(self, choices: Sequence[Choice]) -> FleetPlacement:
        """Return the shorter schedule of two orders: the longest rest first, and as the tasks are given."""
        orders = (self.critical_order(choices), range(len(self.fleet.tasks)))
        return min((self.schedule(choices, order) for order in orders), key=attrgetter("makespan"))

    def schedule(self, choices: Sequence[Choice], order: Sequence[int]) -> FleetPlacement:
        """Return the schedule that starts the tasks of an order as early as those before it allow, also in their gaps.

        Arguments:
            choices: mode and first device of every module.
            order: all tasks; none before a task that it waits for.
        """
        fleet = self.fleet
        modes = [modes[mode] for modes, (mode, _) in zip(fleet.modules, choices, strict=True)]
        masks = [((1 << mode.devices) - 1) << first for mode, (_, first) in zip(modes, choices, strict=True)]
        starts, ends = [0] * len(fleet.tasks), [0] * len(fleet.tasks)
        placed: list[_Use] = []
        for task in order:
            module, duration = fleet.tasks[task].module, duration_of(fleet, task, choices)
            mask, spare = masks[module], fleet.units - modes[module].units
            start = max((ends[other] for other in self._before[task]), default=0)
            if duration:
                rivals = [use for use in placed if use.end > start and use.mask & mask]
                for instant in (start, *sorted(use.end for use in rivals)):  # room grows only where a task ends
                    start = instant
                    beside = [use for use in rivals if use.start < start + duration and use.end > start]
                    if _has_room(beside, mask, spare):
                        break
                placed.append(_Use(start, start + duration, mask, modes[module].units))
            starts[task], ends[task] = start, start + duration
        return FleetPlacement(choices=tuple(choices), starts=tuple(starts), makespan=max(ends, default=0))


class _Use(NamedTuple):
    """Devices that a task uses for a time."""

    start: int
    end: int
    mask: int
    """A bit per device."""
    units: int


def _has_room(beside: Sequence[_Use], mask: int, spare: int) -> bool:
    """Return whether no device of `mask` has more than `spare` units in use at any time."""
    if any(use.units > spare for use in beside):
        return False
    for instant in (use.start for use in beside) if len(beside) > 1 else ():  # use grows only where a task starts
        running = [use for use in beside if use.start <= instant < use.end]
        shared = mask if sum(use.units for use in running) > spare else 0
        while shared:
            device = shared & -shared
            shared ^= device
            if sum(use.units for use in running if use.mask & device) > spare:
                return False
    return True


def violations(fleet: Fleet, placement: FleetPlacement) -> list[str]:
    """Return the broken rules of a placement, by another way than `Scheduler`; empty if it is valid."""
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
        f"task {arc.after} starts before task {arc.before} has ended"
        for arc in fleet.arcs
        if starts[arc.after] < ends[arc.before]
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
