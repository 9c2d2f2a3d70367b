"""Search for the placement with the shortest step.

    place(fleet, starts, seconds=...) -> Placed

The search begins with given choices. For small fleets CP-SAT on devices (`placement_model.py`) improves them, and may
prove the result. For large ones CP-SAT on a pool of devices gives a lower bound, and descents and a local search change
modes, places and order. All schedules come from `placement.Scheduler`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner.placement import (
    GOOD,
    Choice,
    Fleet,
    Mode,
    Placement,
    Scheduler,
    fits,
    groups_of,
    memory_of,
)

DEVICES_SHARE = 0.7
"""Share of the time for CP-SAT on the devices of a small fleet."""

DESCENTS_SHARE, POOL_SHARE = 0.4, 0.25
"""Shares of the time for a large fleet: for descents, and for CP-SAT on the pool."""

DESCENTS = 3
"""Starts from which the local search descends."""

MOST_INTERVALS = 6_000
"""Intervals on devices up to which CP-SAT places modules in useful time."""

HOTTEST = 0.01
"""Excess of a schedule that is accepted in the beginning of the local search, as a share."""

NEAR = 4
"""Largest step of a move in the list of a module's modes."""

WITHOUT_GAIN_S = 3.0
"""The local search ends after this time without a better placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The best placement that was found."""

    placement: Placement
    bound: int
    """Lower bound of the makespan of all placements."""


def place(fleet: Fleet, starts: Sequence[Sequence[Choice]], *, seconds: float, use_solver: bool = True) -> Placed:
    """Return the best placement found within a time, not longer than any of `starts` that keeps the memory.

    Arguments:
        fleet: the problem.
        starts: choices to begin with.
        seconds: time limit.
        use_solver: use CP-SAT; without it, bounds are weak.

    Raises:
        InfeasiblePlanError: no placement keeps the memory; the message has the least that is enough.
    """
    begin = time.monotonic()
    scheduler = Scheduler(fleet)
    if not use_solver:
        kept = _keep(fleet, starts)
        if not kept:
            raise InfeasiblePlanError(f"none of {len(starts)} placements keeps the memory of {fleet.memory} bytes")
        best = min((scheduler.best_of_orders(choices) for choices in kept), key=_makespan)
        bound = _simple_bound(fleet)
        return Placed(placement=_improve(scheduler, best, bound, begin + seconds), bound=bound)
    from apollo_compile.planner import placement_model

    kept = _keep(fleet, [*starts, *_uniform(fleet)])
    if not kept:
        least = placement_model.least_memory(fleet, seconds=seconds / 4)
        if fleet.memory is not None and least.memory > fleet.memory:
            enough = "the least that is enough is" if least.is_proven else "enough is"
            raise InfeasiblePlanError(
                f"no placement of {len(fleet.modules)} modules on {fleet.devices} devices keeps the memory of "
                f"{fleet.memory} bytes per device: {enough} {least.memory} bytes"
            )
        kept = [least.choices]
    found = sorted((scheduler.best_of_orders(choices) for choices in kept), key=_makespan)
    best, bound = found[0], _simple_bound(fleet)
    if _count_intervals(fleet) <= MOST_INTERVALS:
        if bound < best.makespan:
            outcome = placement_model.search(fleet, hint=best, bound=bound, seconds=seconds * DEVICES_SHARE)
            bound = outcome.bound
            if outcome.choices and fits(fleet, outcome.choices):
                best = min(best, scheduler.schedule(outcome.choices, outcome.order), key=_makespan)
    else:
        for turn, start in enumerate(found[:DESCENTS], 1):
            deadline = begin + seconds * DESCENTS_SHARE * turn / DESCENTS
            best = min(best, _descend(scheduler, start, deadline), key=_makespan)
        if bound < best.makespan:
            pool = placement_model.search(fleet, is_pool=True, hint=best, bound=bound, seconds=seconds * POOL_SHARE)
            bound = pool.bound
    best = _improve(scheduler, best, bound, begin + seconds)
    return Placed(placement=best, bound=min(bound, best.makespan))


def _makespan(placement: Placement) -> int:
    return placement.makespan


def _keep(fleet: Fleet, starts: Sequence[Sequence[Choice]]) -> list[Sequence[Choice]]:
    return [choices for choices in starts if fits(fleet, choices)]


def _uniform(fleet: Fleet) -> list[tuple[Choice, ...]]:
    """Return choices in which all modules have about the same devices and units, from the first device on."""
    kinds = {(mode.devices, mode.units) for modes in fleet.modules for mode in modes}

    def nearest(modes: Sequence[Mode], devices: int, units: int) -> int:
        return min(
            range(len(modes)), key=lambda index: (abs(modes[index].devices - devices), abs(modes[index].units - units))
        )

    return [tuple((nearest(modes, *kind), 0) for modes in fleet.modules) for kind in sorted(kinds)]


def _simple_bound(fleet: Fleet) -> int:
    """Return the larger of the longest chain in the fastest modes and the least work over all devices."""
    ends = [0] * len(fleet.tasks)
    heads = [0] * len(fleet.tasks)
    before: list[list[int]] = [[] for _ in fleet.tasks]
    for arc in fleet.arcs:
        before[arc.after].append(arc.before)
    for task, work in enumerate(fleet.tasks):
        heads[task] = max((ends[other] for other in before[task]), default=0)
        ends[task] = heads[task] + min(work.durations)
    least = [0] * len(fleet.modules)
    for index, modes in enumerate(fleet.modules):
        own = [task for task in fleet.tasks if task.module == index]
        least[index] = min(
            sum(task.durations[number] for task in own) * mode.devices * mode.units for number, mode in enumerate(modes)
        )
    return max(max(ends, default=0), -(-sum(least) // (fleet.devices * fleet.units)))


def _count_intervals(fleet: Fleet) -> int:
    """Return how many intervals on devices CP-SAT would have."""
    return sum(
        len(groups_of(fleet, mode)) * mode.devices for task in fleet.tasks for mode in fleet.modules[task.module]
    )


# ------------------------------------------------------------------------------------------------------- local search


def _descend(scheduler: Scheduler, best: Placement, deadline: float) -> Placement:
    """Return a placement that no other mode of one module makes shorter, each on its least loaded devices."""
    fleet, before = scheduler.fleet, -1
    while before != best.makespan and time.monotonic() < deadline:
        before = best.makespan
        for module, modes in enumerate(fleet.modules):
            load = [0] * fleet.devices
            for task in fleet.tasks:
                number, first = best.choices[task.module]
                mode = fleet.modules[task.module][number]
                for device in range(first, first + mode.devices) if task.module != module else ():
                    load[device] += task.durations[number] * mode.units
            for number, mode in enumerate(modes):
                first = min(groups_of(fleet, mode), key=lambda each: max(load[each : each + mode.devices]))
                choices = (*best.choices[:module], (number, first), *best.choices[module + 1 :])
                if fits(fleet, choices) and time.monotonic() < deadline:
                    order = scheduler.critical_order(choices)
                    best = scheduler.schedule_within(choices, order, best.makespan - 1) or best
    return best


def _improve(scheduler: Scheduler, start: Placement, bound: int, deadline: float) -> Placement:
    """Return the best placement of a local search, whose acceptance narrows until the deadline."""
    fleet, rng = scheduler.fleet, random.Random(0)
    begin = last_gain = time.monotonic()
    now = best = start
    order = scheduler.order_of(start)
    while best.makespan * (1 - GOOD) > bound and (instant := time.monotonic()) < min(
        deadline, last_gain + WITHOUT_GAIN_S
    ):
        heat = HOTTEST * (1 - (instant - begin) / max(1e-9, deadline - begin))
        for choices, tried in _moves(scheduler, now, order, rng):
            if not fits(fleet, choices):
                continue
            found = scheduler.schedule_within(choices, tried, now.makespan * (1 + heat * rng.random()))
            if found is None:
                continue
            now, order = found, scheduler.order_of(found)
            if _key(fleet, found) < _key(fleet, best):
                last_gain = instant if found.makespan < best.makespan else last_gain
                best = found
    return best


def _key(fleet: Fleet, placement: Placement) -> tuple[int, int]:
    """Return what is minimised: the step, then the memory of the fullest device."""
    return placement.makespan, max(memory_of(fleet, placement.choices), default=0)


def _moves(
    scheduler: Scheduler, now: Placement, order: Sequence[int], rng: random.Random
) -> Iterator[tuple[tuple[Choice, ...], Sequence[int]]]:
    """Yield one or two neighbours of a placement: choices, and an order of tasks."""
    fleet, choices = scheduler.fleet, list(now.choices)
    module = rng.randrange(len(choices))
    kind = rng.random()
    if kind < 0.25:  # another task first
        yield tuple(choices), _shift(fleet, order, rng)
        return
    if kind < 0.4:  # the place of another module
        other = rng.randrange(len(choices))
        choices[module] = _nearest(fleet, module, choices[module][0], now.choices[other][1])
        choices[other] = _nearest(fleet, other, choices[other][0], now.choices[module][1])
    else:
        mode = choices[module][0] if kind < 0.6 else choices[module][0] + rng.randint(-NEAR, NEAR)
        mode = min(max(mode, 0), len(fleet.modules[module]) - 1)
        choices[module] = (mode, rng.choice(groups_of(fleet, fleet.modules[module][mode])))
    yield tuple(choices), order
    yield tuple(choices), scheduler.critical_order(choices)


def _nearest(fleet: Fleet, module: int, mode: int, device: int) -> Choice:
    """Return the group of a mode that has a device."""
    size = fleet.modules[module][mode].devices
    return mode, min(device // size * size, groups_of(fleet, fleet.modules[module][mode])[-1])


def _shift(fleet: Fleet, order: Sequence[int], rng: random.Random) -> list[int]:
    """Return the order with one task at another place that its arcs allow."""
    place = {task: index for index, task in enumerate(order)}
    task = rng.choice(order)
    first = max((place[arc.before] + 1 for arc in fleet.arcs if arc.after == task), default=0)
    last = min((place[arc.after] for arc in fleet.arcs if arc.before == task), default=len(order))
    changed = [other for other in order if other != task]
    changed.insert(rng.randrange(first, max(first + 1, last)), task)
    return changed
