"""Search for a short placement of modules on groups of devices (`fleet.py`).

    place(fleet, starts, seconds=...) -> PlacementSolution

Descents from given choices, and from those in which all modules have the same group, change the mode and the place of
one module at a time. Then CP-SAT on devices (`placement_model.py`) improves the best for a small fleet, and may prove
it; for a large one, CP-SAT on a pool of devices gives a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner.fleet import (
    Choice,
    Fleet,
    FleetPlacement,
    PlacementMode,
    Scheduler,
    fits,
    groups_of,
    memory_of,
)

DESCENTS_SHARE = 0.5
"""Largest share of the time for descents."""

MOST_INTERVALS = 6_000
"""Intervals on devices up to which CP-SAT places modules in useful time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSolution:
    """The best placement that was found."""

    placement: FleetPlacement
    bound: int
    """Lower bound of the makespan of all placements."""


def place(
    fleet: Fleet, starts: Sequence[Sequence[Choice]], *, seconds: float, use_solver: bool = True
) -> PlacementSolution:
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
    kept = [choices for choices in dict.fromkeys((*map(tuple, starts), *_uniform(fleet))) if fits(fleet, choices)]
    if use_solver:
        from apollo_compile.planner import placement_model
    elif not kept:
        raise InfeasiblePlanError(f"no placement was found that keeps the memory of {fleet.memory} bytes per device")
    if not kept:
        least = placement_model.least_memory(fleet, seconds=seconds)
        memory = max(memory_of(fleet, least.choices))
        if fleet.memory is not None and memory > fleet.memory:
            raise InfeasiblePlanError(
                f"no placement of {len(fleet.modules)} modules on {fleet.devices} devices keeps the memory of "
                f"{fleet.memory} bytes per device: {'the least that is enough' if least.bound == memory else 'enough'} "
                f"is {memory} bytes"
            )
        kept = [least.choices]
    found = sorted((scheduler.best_of_orders(choices) for choices in kept), key=attrgetter("makespan"))
    for turn, start in enumerate(found, 1):
        deadline = begin + seconds * DESCENTS_SHARE * turn / len(found)
        found[turn - 1] = _descend(scheduler, start, deadline)
    best, bound = min(found, key=attrgetter("makespan")), _simple_bound(fleet)
    if use_solver and bound < best.makespan:
        count = sum(len(groups_of(fleet, m)) * m.devices for task in fleet.tasks for m in fleet.modules[task.module])
        is_pool = count > MOST_INTERVALS
        left = max(0.1, begin + seconds - time.monotonic())
        outcome = placement_model.search(fleet, is_pool=is_pool, hint=best, bound=bound, seconds=left)
        bound = outcome.bound
        if outcome.choices and not is_pool:
            best = min(best, scheduler.schedule(outcome.choices, outcome.order), key=attrgetter("makespan"))
    return PlacementSolution(placement=best, bound=min(bound, best.makespan))


def _uniform(fleet: Fleet) -> list[tuple[Choice, ...]]:
    """Return choices in which all modules have about the same devices and units, from the first device on."""

    def nearest(modes: Sequence[PlacementMode], like: PlacementMode) -> int:
        off = [(abs(mode.devices - like.devices), abs(mode.units - like.units)) for mode in modes]
        return off.index(min(off))

    return [tuple((nearest(modes, like), 0) for modes in fleet.modules) for each in fleet.modules for like in each]


def _simple_bound(fleet: Fleet) -> int:
    """Return the larger of the longest chain in the fastest modes and the least work over all devices."""
    fastest = [min(task.durations) for task in fleet.tasks]
    ends = fastest.copy()
    for arc in sorted(fleet.arcs, key=attrgetter("after")):
        ends[arc.after] = max(ends[arc.after], ends[arc.before] + fastest[arc.after])
    least = sum(
        min(
            sum(task.durations[number] for task in fleet.tasks if task.module == index) * mode.devices * mode.units
            for number, mode in enumerate(modes)
        )
        for index, modes in enumerate(fleet.modules)
    )
    return max(*ends, -(-least // (fleet.devices * fleet.units)))


def _descend(scheduler: Scheduler, best: FleetPlacement, deadline: float) -> FleetPlacement:
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
                    best = min(
                        best, scheduler.schedule(choices, scheduler.critical_order(choices)), key=attrgetter("makespan")
                    )
    return best
