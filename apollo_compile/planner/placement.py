"""Placement of modules on groups of devices: the problem, its schedules, and their check.

    Scheduler(fleet).schedule(choices, order) -> Placement;  violations(fleet, placement) -> [text]

A fleet has equal devices in a row. A module takes an aligned group of them (a group of n devices begins at a multiple
of n) in one of its modes, and keeps it: all its tasks run there, on the units of its mode on each device of the group.
An arc delays a task after another: by nothing if both modules have the same group, else by a time that depends on the
numbers of devices. At every instant, the units in use on a device are at most its own; the memory of all modules on a
device is at most its memory. Times are integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

GOOD = 1e-3
"""Share of a makespan above its bound at which searches end."""


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
    delays: Mapping[tuple[int, int], int]
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


class Scheduler:
    """Schedules of one fleet: what they have in common is computed once."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._module_of = [task.module for task in fleet.tasks]
        self._waits: list[list[Arc]] = [[] for _ in fleet.tasks]
        self._followers: list[list[Arc]] = [[] for _ in fleet.tasks]
        for arc in fleet.arcs:
            self._waits[arc.after].append(arc)
            self._followers[arc.before].append(arc)

    def critical_order(self, choices: Sequence[Choice]) -> list[int]:
        """Return the tasks in an order that starts those with the longest rest of the step first."""
        tails = self._tails(choices)
        return sorted(range(len(tails)), key=lambda task: (-tails[task], task))

    def _tails(self, choices: Sequence[Choice]) -> list[int]:
        """Return the least time from the start of every task to the end of the step."""
        fleet = self.fleet
        tails = [0] * len(fleet.tasks)
        for task in reversed(range(len(fleet.tasks))):
            rest = [delay_of(fleet, arc, choices) + tails[arc.after] for arc in self._followers[task]]
            tails[task] = max(rest, default=0) + duration_of(fleet, task, choices)
        return tails

    def order_of(self, placement: Placement) -> list[int]:
        """Return the tasks by start, each after those that it waits for."""
        place = sorted(range(len(self.fleet.tasks)), key=lambda task: (placement.starts[task], task))
        order: list[int] = []
        done = [False] * len(place)
        while place:
            ready = next(task for task in place if all(done[arc.before] for arc in self._waits[task]))
            place.remove(ready)
            order.append(ready)
            done[ready] = True
        return order

    def settle(self, placement: Placement) -> Placement:
        """Return the placement with all tasks as early as their order allows."""
        while True:
            again = self.schedule(placement.choices, self.order_of(placement))
            if again.starts == placement.starts:
                return again
            placement = again

    def best_of_orders(self, choices: Sequence[Choice]) -> Placement:
        """Return the shorter schedule of two orders: the longest rest first, and as the tasks are given."""
        orders = (self.critical_order(choices), range(len(self.fleet.tasks)))
        return min((self.schedule(choices, order) for order in orders), key=lambda placement: placement.makespan)

    def schedule(self, choices: Sequence[Choice], order: Sequence[int]) -> Placement:
        """Return the schedule that starts the tasks of an order as early as those before it allow, also in their gaps.

        Arguments:
            choices: mode and first device of every module.
            order: all tasks; none before a task that it waits for.
        """
        placement = self.schedule_within(choices, order, math.inf)
        assert placement is not None  # no schedule is longer
        return placement

    def schedule_within(self, choices: Sequence[Choice], order: Sequence[int], limit: float) -> Placement | None:
        """Return the schedule of an order; None if it is longer than the limit."""
        fleet, module_of = self.fleet, self._module_of
        masks, units = [], []
        for modes, (mode, first) in zip(fleet.modules, choices, strict=True):
            masks.append(((1 << modes[mode].devices) - 1) << first)
            units.append(modes[mode].units)
        tails = self._tails(choices) if limit < math.inf else [0] * len(fleet.tasks)
        starts, ends = [0] * len(fleet.tasks), [0] * len(fleet.tasks)
        placed: list[tuple[int, int, int]] = []
        """Start, end and module of the tasks that have a place."""
        for task in order:
            module = module_of[task]
            mask, spare = masks[module], fleet.units - units[module]
            start = 0
            for arc in self._waits[task]:
                start = max(start, ends[arc.before] + delay_of(fleet, arc, choices))
            duration = fleet.tasks[task].durations[choices[module][0]]
            if duration:
                rivals = sorted(other for other in placed if other[1] > start and masks[other[2]] & mask)
                alone = [(begin, end) for begin, end, other in rivals if units[other] > spare]
                beside = [
                    (begin, end, masks[other], units[other]) for begin, end, other in rivals if units[other] <= spare
                ]
                while True:
                    for begin, end in alone:
                        if begin >= start + duration:
                            break
                        start = max(start, end)
                    both = [other for other in beside if other[0] < start + duration and other[1] > start]
                    if len(both) < 2 or _has_room(both, mask, spare):
                        break
                    start = min(end for _, end, _, _ in both)
                placed.append((start, start + duration, module))
                if start + tails[task] > limit:
                    return None
            starts[task], ends[task] = start, start + duration
        return Placement(choices=tuple(choices), starts=tuple(starts), makespan=max(ends, default=0))


def _has_room(others: Sequence[tuple[int, int, int, int]], mask: int, spare: int) -> bool:
    """Return whether no device of `mask` has more than `spare` units in use while `others` run."""
    for instant, _, _, _ in others:  # the use of a device grows only when a task starts
        running = [(other, units) for start, end, other, units in others if start <= instant < end]
        if sum(units for _, units in running) <= spare:
            continue
        shared = mask
        while shared:
            device = shared & -shared
            shared ^= device
            if sum(units for other, units in running if other & device) > spare:
                return False
    return True


def violations(fleet: Fleet, placement: Placement) -> list[str]:
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
