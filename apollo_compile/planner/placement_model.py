"""Constraint programming for placements: CP-SAT on devices, or on a pool of devices for a lower bound.

    search(fleet, is_pool=..., ...), least_memory(fleet, seconds=...) -> PlacementOutcome

In the pool a module has a number of devices but no place: the units of all devices are one resource. Every placement is
a solution of the pool, so its bound holds, and there are few choices. Times are rounded down to ticks, which keeps
bounds valid; schedules are computed again by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.fleet import Choice, Fleet, FleetPlacement, groups_of

MOST_TICKS = 50_000
"""Ticks of the longest schedule that is searched for."""

GOOD = 1e-3
"""Share of a makespan above its bound at which a search ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOutcome:
    """The best solution of a model."""

    choices: tuple[Choice, ...]
    """Choices by module; in the pool, every first device is 0. Empty if no solution was found."""
    order: tuple[int, ...]
    """Tasks by start."""
    bound: int
    """Lower bound of the objective."""


def search(
    fleet: Fleet, *, hint: FleetPlacement, bound: int, seconds: float, is_pool: bool = False
) -> PlacementOutcome:
    """Search for a schedule that is shorter than the hint.

    Arguments:
        fleet: the problem.
        hint: a valid placement.
        bound: a lower bound of the makespan.
        seconds: time limit.
        is_pool: leave out the places of groups, for a lower bound and numbers of devices.
    """
    tick = max(1, hint.makespan // MOST_TICKS)
    horizon = -(-hint.makespan // tick)
    cp = cp_model.CpModel()
    at = _options(cp, fleet, is_pool=is_pool)
    makespan = cp.new_int_var(bound // tick, horizon, "makespan")
    starts = [cp.new_int_var(0, horizon, f"start {task}") for task in range(len(fleet.tasks))]
    ends = [cp.new_int_var(0, horizon, f"end {task}") for task in range(len(fleet.tasks))]
    whole = fleet.devices * fleet.units
    users: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(1 if is_pool else fleet.devices)]
    own: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in fleet.modules]
    work: list[list[cp_model.LinearExprT]] = [[] for _ in fleet.tasks]
    for index, task in enumerate(fleet.tasks):
        cp.add(ends[index] <= makespan)
        for (number, first), on in at[task.module].items():
            mode, duration = fleet.modules[task.module][number], task.durations[number] // tick
            name = f"task {index} in mode {number} at {first}"
            interval = cp.new_optional_interval_var(starts[index], duration, ends[index], on, name)
            work[index].append(on * (duration * mode.units * mode.devices))
            own[task.module].append((interval, mode.units))
            for device in (0,) if is_pool else range(first, first + mode.devices):
                users[device].append((interval, mode.units * (mode.devices if is_pool else 1)))
    limits = [(each, whole if is_pool else fleet.units) for each in users] + [(each, fleet.units) for each in own]
    for intervals, limit in limits:
        cp.add_cumulative([interval for interval, _ in intervals], [units for _, units in intervals], limit)
    for arc in fleet.arcs:
        cp.add(starts[arc.after] >= ends[arc.before])
    if fleet.memory is not None and not is_pool:
        for device in range(fleet.devices):
            cp.add(_memory_on(fleet, at, device) <= fleet.memory)
    _add_work(cp, fleet, work, starts, ends, makespan)
    for options, (mode_of_hint, place) in zip(at, hint.choices, strict=True):
        for (number, first), on in options.items():
            cp.add_hint(on, number == mode_of_hint and (is_pool or first == place))
    for variable, value in zip((*starts, makespan), (*hint.starts, hint.makespan), strict=True):
        cp.add_hint(variable, value // tick)
    cp.minimize(makespan)
    solver, status = _solve(cp, seconds)
    order: list[int] = []
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        times = [(solver.value(start), solver.value(end)) for start, end in zip(starts, ends, strict=True)]
        order = sorted(range(len(times)), key=lambda task: (times[task], task))
    return PlacementOutcome(
        choices=_chosen(solver, at) if order else (),
        order=tuple(order),
        bound=max(bound, round(max(0, solver.best_objective_bound)) * tick),
    )


def _add_work(
    cp: cp_model.CpModel,
    fleet: Fleet,
    work: Sequence[Sequence[cp_model.LinearExprT]],
    starts: Sequence[cp_model.IntVar],
    ends: Sequence[cp_model.IntVar],
    makespan: cp_model.IntVar,
) -> None:
    """Add, implied by the rest: all units have time for the work before a task, after it, and for all work."""
    units = fleet.devices * fleet.units
    before: list[set[int]] = [set() for _ in fleet.tasks]
    after: list[set[int]] = [set() for _ in fleet.tasks]
    for arc in sorted(fleet.arcs, key=lambda arc: arc.after):
        before[arc.after] |= before[arc.before] | {arc.before}
    for arc in sorted(fleet.arcs, key=lambda arc: -arc.before):
        after[arc.before] |= after[arc.after] | {arc.after}

    def work_of(tasks: Iterable[int]) -> cp_model.LinearExprT:
        return sum(term for task in tasks for term in work[task])

    for index in range(len(fleet.tasks)):
        cp.add(work_of(before[index]) <= units * starts[index])
        cp.add(work_of(after[index]) <= units * (makespan - ends[index]))
    cp.add(work_of(range(len(fleet.tasks))) <= units * makespan)


def least_memory(fleet: Fleet, *, seconds: float) -> PlacementOutcome:
    """Return the choices with the least memory of the fullest device, in every run the same, and a lower bound."""
    cp = cp_model.CpModel()
    at = _options(cp, fleet)
    most = cp.new_int_var(0, sum(max(mode.memory for mode in modes) for modes in fleet.modules), "most")
    for device in range(fleet.devices):
        cp.add(_memory_on(fleet, at, device) <= most)
    cp.minimize(most)
    solver, status = _solve(cp, seconds, is_repeatable=True)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InvariantError(f"CP-SAT found no placement without a limit of memory: {solver.status_name(status)}")
    return PlacementOutcome(choices=_chosen(solver, at), order=(), bound=round(solver.best_objective_bound))


def _solve(
    cp: cp_model.CpModel, seconds: float, *, is_repeatable: bool = False
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1 if is_repeatable else min(8, len(os.sched_getaffinity(0)))
    solver.parameters.max_time_in_seconds = seconds
    if is_repeatable:  # CP-SAT's own count of its work, which is about a unit a second
        solver.parameters.max_deterministic_time = seconds / 4
    solver.parameters.relative_gap_limit = GOOD
    solver.parameters.cp_model_probing_level = 0  # halves the time to the first bound of a large pool
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(cp)
    if status == cp_model.MODEL_INVALID:
        raise InvariantError(f"CP-SAT rejects the model of placements: {cp.validate()}")
    return solver, status


_Options = list[dict[Choice, cp_model.IntVar]]
"""By module and choice, whether it is chosen."""


def _options(cp: cp_model.CpModel, fleet: Fleet, *, is_pool: bool = False) -> _Options:
    """Return a variable for every choice of every module, of which one is true."""
    at: _Options = []
    for index, modes in enumerate(fleet.modules):
        choices = [
            (number, first)
            for number, mode in enumerate(modes)
            for first in ((0,) if is_pool else groups_of(fleet, mode))
        ]
        at.append({choice: cp.new_bool_var(f"module {index} in mode {choice[0]} at {choice[1]}") for choice in choices})
        cp.add_exactly_one(at[-1].values())
    return at


def _chosen(solver: cp_model.CpSolver, at: _Options) -> tuple[Choice, ...]:
    return tuple(next(choice for choice, on in options.items() if solver.boolean_value(on)) for options in at)


def _memory_on(fleet: Fleet, at: _Options, device: int) -> cp_model.LinearExprT:
    """Return the bytes on a device."""
    return sum(
        on * fleet.modules[index][mode].memory
        for index, options in enumerate(at)
        for (mode, first), on in options.items()
        if first <= device < first + fleet.modules[index][mode].devices
    )
