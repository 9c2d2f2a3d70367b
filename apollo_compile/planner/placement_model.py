"""Constraint programming for placements: CP-SAT on devices, or on a pool of devices for a lower bound.

    search(fleet, is_pool=..., ...) -> Outcome;  least_memory(fleet, seconds=...) -> Least

In the pool a module has a number of devices but no place: the units of all devices are one resource, and modules with
equally many devices have the same group. Every placement is a solution of the pool, so its bound holds, and there are
few choices. Times are rounded down to ticks, which keeps bounds valid; schedules are computed again by the caller.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.placement import GOOD, Choice, Fleet, Placement, groups_of

MOST_TICKS = 50_000
"""Ticks of the longest schedule that is searched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The best solution of a model."""

    choices: tuple[Choice, ...]
    """By module; in the pool, every first device is 0. Empty if no solution was found."""
    order: tuple[int, ...]
    """Tasks by start."""
    bound: int
    is_proven: bool
    """Whether no solution of the model is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """The placement with the least memory of any device that was found."""

    choices: tuple[Choice, ...]
    memory: int
    is_proven: bool


def search(
    fleet: Fleet,
    *,
    hint: Placement,
    bound: int,
    seconds: float,
    options: Sequence[Sequence[Choice]] | None = None,
    is_pool: bool = False,
) -> Outcome:
    """Search for a schedule that is shorter than the hint.

    Arguments:
        fleet: the problem.
        hint: a valid placement.
        bound: a lower bound of the makespan.
        seconds: time limit.
        options: by module, the choices to search; the outcome's bound holds for these only. None is all.
        is_pool: leave out where the groups are, for a lower bound and numbers of devices.
    """
    tick = max(1, hint.makespan // MOST_TICKS)
    if is_pool:
        options = [[(number, 0) for number in range(len(modes))] for modes in fleet.modules]
    model = _Model(fleet, options or _all_choices(fleet), tick, -(-hint.makespan // tick), is_pool)
    model.cp.add(model.makespan >= bound // tick)
    model.hint(hint)
    model.cp.minimize(model.makespan)
    solver, status = _solve(model.cp, seconds)
    floor = solver.best_objective_bound
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    starts = [solver.value(start) for start in model.starts] if found else []
    ends = [solver.value(end) for end in model.ends] if found else []
    return Outcome(
        choices=tuple(
            next(option for option, on in options.items() if solver.boolean_value(on)) for options in model.at
        )
        if found
        else (),
        order=tuple(sorted(range(len(starts)), key=lambda task: (starts[task], ends[task], task))),
        bound=max(bound, round(floor) * tick if math.isfinite(floor) else 0),
        is_proven=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
    )


def least_memory(fleet: Fleet, *, seconds: float) -> Least:
    """Return the placement with the least memory of the fullest device."""
    cp = cp_model.CpModel()
    at = _options(cp, _all_choices(fleet))
    most = cp.new_int_var(0, sum(max(mode.memory for mode in modes) for modes in fleet.modules), "most")
    for device in range(fleet.devices):
        cp.add(_memory_on(fleet, at, device) <= most)
    cp.minimize(most)
    solver, status = _solve(cp, seconds)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InvariantError(f"CP-SAT found no placement without a limit of memory: {solver.status_name(status)}")
    choices = tuple(next(option for option, on in options.items() if solver.boolean_value(on)) for options in at)
    return Least(choices=choices, memory=solver.value(most), is_proven=status == cp_model.OPTIMAL)


def _solve(cp: cp_model.CpModel, seconds: float) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = min(8, len(os.sched_getaffinity(0)))
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.relative_gap_limit = GOOD
    solver.parameters.cp_model_probing_level = 0  # halves the time to the first bound of a large pool
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(cp)
    if status == cp_model.MODEL_INVALID:
        raise InvariantError(f"CP-SAT rejects the model of placements: {cp.validate()}")
    return solver, status


_Options = list[dict[Choice, cp_model.IntVar]]


def _all_choices(fleet: Fleet) -> list[list[Choice]]:
    return [
        [(number, first) for number, mode in enumerate(modes) for first in groups_of(fleet, mode)]
        for modes in fleet.modules
    ]


def _options(cp: cp_model.CpModel, options: Sequence[Sequence[Choice]]) -> _Options:
    """Return a variable for every choice of every module, of which one is true."""
    at: _Options = []
    for index, choices in enumerate(options):
        at.append({choice: cp.new_bool_var(f"module {index} in mode {choice[0]} at {choice[1]}") for choice in choices})
        cp.add_exactly_one(at[-1].values())
    return at


def _memory_on(fleet: Fleet, at: _Options, device: int) -> cp_model.LinearExprT:
    """Return the bytes on a device."""
    return sum(
        on * fleet.modules[index][mode].memory
        for index, options in enumerate(at)
        for (mode, first), on in options.items()
        if first <= device < first + fleet.modules[index][mode].devices
    )


class _Model:
    """The variables and rules of a fleet in CP-SAT.

    Arguments:
        fleet: the problem.
        options: by module, the choices to search.
        tick: unit of time in the model.
        horizon: longest makespan, in ticks.
        is_pool: whether devices are one pool.
    """

    def __init__(
        self, fleet: Fleet, options: Sequence[Sequence[Choice]], tick: int, horizon: int, is_pool: bool
    ) -> None:
        self.fleet, self.tick, self.is_pool = fleet, tick, is_pool
        self.cp = cp_model.CpModel()
        self.at = _options(self.cp, options)
        self.makespan = self.cp.new_int_var(0, horizon, "makespan")
        self.starts = [self.cp.new_int_var(0, horizon, f"start {task}") for task in range(len(fleet.tasks))]
        self.ends = [self.cp.new_int_var(0, horizon, f"end {task}") for task in range(len(fleet.tasks))]
        self.in_mode = [
            [sum(on for (number, _), on in options.items() if number == mode) for mode in range(len(modes))]
            for modes, options in zip(fleet.modules, self.at, strict=True)
        ]
        self._add_tasks()
        self._add_arcs()
        if not is_pool and fleet.memory is not None:
            for device in self._distinct_devices():
                self.cp.add(_memory_on(fleet, self.at, device) <= fleet.memory)

    def hint(self, placement: Placement) -> None:
        """Begin the search with a placement."""
        for options, (mode, first) in zip(self.at, placement.choices, strict=True):
            for (number, place), on in options.items():
                self.cp.add_hint(on, number == mode and (self.is_pool or place == first))
        for start, variable in zip(placement.starts, self.starts, strict=True):
            self.cp.add_hint(variable, start // self.tick)
        self.cp.add_hint(self.makespan, placement.makespan // self.tick)

    def _add_tasks(self) -> None:
        """Add the tasks with the units that they use."""
        fleet, cp = self.fleet, self.cp
        users: dict[int, list[tuple[cp_model.IntervalVar, int]]] = {
            device: [] for device in ((0,) if self.is_pool else self._distinct_devices())
        }
        own: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in fleet.modules]
        work: list[list[cp_model.LinearExprT]] = [[] for _ in fleet.tasks]
        work_everywhere: list[list[cp_model.LinearExprT]] = [[] for _ in fleet.tasks]
        for index, task in enumerate(fleet.tasks):
            length = sum(
                (duration // self.tick) * self.in_mode[task.module][mode]
                for mode, duration in enumerate(task.durations)
            )
            cp.add(self.ends[index] == self.starts[index] + length)
            cp.add(self.ends[index] <= self.makespan)
            for (number, first), on in self.at[task.module].items():
                mode, duration = fleet.modules[task.module][number], task.durations[number] // self.tick
                if not duration:
                    continue
                interval = cp.new_optional_interval_var(
                    self.starts[index], duration, self.ends[index], on, f"task {index} in mode {number} at {first}"
                )
                work[index].append(on * (duration * mode.units))
                work_everywhere[index].append(on * (duration * mode.units * mode.devices))
                if self.is_pool:
                    users[0].append((interval, mode.devices * mode.units))
                    own[task.module].append((interval, mode.units))
                else:
                    for device in users.keys() & range(first, first + mode.devices):
                        users[device].append((interval, mode.units))
        capacity = fleet.devices * fleet.units
        self._add_work(work, fleet.units, is_of_one_module=True)
        self._add_work(work_everywhere, capacity, is_of_one_module=False)
        each = capacity if self.is_pool else fleet.units
        for intervals, limit in (
            *((group, each) for group in users.values()),
            *((group, fleet.units) for group in own),
        ):
            if intervals:
                cp.add_cumulative([interval for interval, _ in intervals], [units for _, units in intervals], limit)

    def _distinct_devices(self) -> list[int]:
        """Return one of all devices that the same choices use."""
        found: dict[tuple[tuple[int, Choice], ...], int] = {}
        for device in range(self.fleet.devices):
            users = tuple(
                (index, (mode, first))
                for index, options in enumerate(self.at)
                for mode, first in options
                if first <= device < first + self.fleet.modules[index][mode].devices
            )
            found.setdefault(users, device)
        return list(found.values())

    def _add_work(self, work: list[list[cp_model.LinearExprT]], units: int, *, is_of_one_module: bool) -> None:
        """Add, implied by the rest: the units have time for the work before a task, after it, and for all work."""
        fleet, cp = self.fleet, self.cp
        before: list[set[int]] = [set() for _ in fleet.tasks]
        after: list[set[int]] = [set() for _ in fleet.tasks]
        for arc in sorted(fleet.arcs, key=lambda arc: arc.after):
            before[arc.after] |= before[arc.before] | {arc.before}
        for arc in sorted(fleet.arcs, key=lambda arc: -arc.before):
            after[arc.before] |= after[arc.after] | {arc.after}

        def sum_of(tasks: set[int], module: int) -> cp_model.LinearExprT | None:
            own = [task for task in tasks if not is_of_one_module or fleet.tasks[task].module == module]
            terms = [term for task in own for term in work[task]]
            return sum(terms) if len(own) > 1 and terms else None

        for index, task in enumerate(fleet.tasks):
            if (head := sum_of(before[index], task.module)) is not None:
                cp.add(head <= units * self.starts[index])
            if (tail := sum_of(after[index], task.module)) is not None:
                cp.add(tail <= units * (self.makespan - self.ends[index]))
        for module in range(len(fleet.modules)) if is_of_one_module else (0,):
            if (whole := sum_of(set(range(len(fleet.tasks))), module)) is not None:
                cp.add(whole <= units * self.makespan)

    def _add_arcs(self) -> None:
        """Add the order of tasks, with delays between groups."""
        pairs: dict[tuple[int, int], cp_model.IntVar | None] = {}
        for arc in self.fleet.arcs:
            one, other = self.fleet.tasks[arc.before].module, self.fleet.tasks[arc.after].module
            self.cp.add(self.starts[arc.after] >= self.ends[arc.before])
            if one == other or not any(arc.delays.values()):
                continue
            if (one, other) not in pairs:
                pairs[one, other] = self._same_group(one, other)
            same = pairs[one, other]
            for (k, before), (m, after) in product(*(enumerate(self.fleet.modules[each]) for each in (one, other))):
                delay = arc.delays.get((before.devices, after.devices), 0) // self.tick
                excess = self.in_mode[one][k] + self.in_mode[other][m] - 1
                if before.devices == after.devices:
                    excess -= 1 if same is None else same
                if not delay:
                    continue
                self.cp.add(self.starts[arc.after] >= self.ends[arc.before] + delay * excess)

    def _same_group(self, one: int, other: int) -> cp_model.IntVar | None:
        """Return whether two modules have one group; None in the pool, where groups of one size are the same."""
        if self.is_pool:
            return None
        groups = [self._group(index) for index in (one, other)]
        same = self.cp.new_bool_var(f"modules {one} and {other} have one group")
        self.cp.add(groups[0] == groups[1]).only_enforce_if(same)
        return same

    def _group(self, index: int) -> cp_model.LinearExprT:
        """Return the number of a module's group: the same for the same devices."""
        return sum(
            on * (self.fleet.modules[index][mode].devices * self.fleet.devices + first)
            for (mode, first), on in self.at[index].items()
        )
