"""Placements of modules on groups of devices, against exhaustive search."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner import placement_model
from apollo_compile.planner.apart import place_apart
from apollo_compile.planner.fleet import (
    Arc,
    Choice,
    Fleet,
    FleetPlacement,
    PlacementMode,
    PlacementTask,
    Scheduler,
    fits,
    groups_of,
    memory_of,
    violations,
)
from apollo_compile.planner.placement import place


def random_fleet(seed: int, *, memory: bool = False) -> Fleet:
    """Return a small fleet: two or three modules on two or four devices, forwards and backwards."""
    rng = random.Random(seed)
    devices = rng.choice([2, 2, 4])
    sizes = [size for size in (1, 2, 4) if size <= devices]
    quotas = rng.choice([(2,), (1, 2)])
    modules, tasks = [], []
    count = rng.randint(2, 3) if devices == 2 else 2
    for module in range(count):
        held = rng.randint(1, 6)
        pairs = itertools.product(sizes, quotas)
        modules.append(tuple(PlacementMode(devices=n, units=units, memory=held + 4 // n) for n, units in pairs))
        work = rng.randint(4, 40)
        times = tuple(
            work // mode.devices * (1 if mode.units == 2 else rng.choice([1, 2])) + rng.randint(0, 3)
            for mode in modules[-1]
        )
        tasks.append(PlacementTask(module=module, durations=times))
    tasks += [replace(task, durations=tuple(2 * time for time in task.durations)) for task in reversed(tasks)]
    arcs = []
    for before, after in itertools.combinations(range(count), 2):
        if rng.random() < 0.5:
            arcs += [Arc(before, after), Arc(2 * count - 1 - after, 2 * count - 1 - before)]
    arcs += [Arc(module, 2 * count - 1 - module) for module in range(count)]
    parts = {"modules": tuple(modules), "tasks": tuple(tasks), "arcs": tuple(arcs)}
    return Fleet(devices=devices, units=2, memory=rng.randint(6, 12) if memory else None, **parts)


def all_choices(fleet: Fleet) -> Iterator[tuple[Choice, ...]]:
    """Yield the choices of all modules."""
    return itertools.product(
        *([(n, first) for n, mode in enumerate(modes) for first in groups_of(fleet, mode)] for modes in fleet.modules)
    )


def all_orders(fleet: Fleet) -> Iterator[tuple[int, ...]]:
    """Yield the orders of tasks that the arcs allow."""
    before = {(arc.before, arc.after) for arc in fleet.arcs}
    for order in itertools.permutations(range(len(fleet.tasks))):
        place_of = {task: index for index, task in enumerate(order)}
        if all(place_of[one] < place_of[other] for one, other in before):
            yield order


@functools.cache
def shortest(fleet: Fleet) -> int | None:
    """Return the shortest makespan; None if nothing keeps the memory."""
    orders, scheduler = list(all_orders(fleet)), Scheduler(fleet)
    pairs = itertools.product((choices for choices in all_choices(fleet) if fits(fleet, choices)), orders)
    return min((scheduler.schedule(choices, order).makespan for choices, order in pairs), default=None)


def everywhere(fleet: Fleet) -> tuple[Choice, ...]:
    """Return data parallelism: every module on all devices, with all units."""
    return tuple((len(modes) - 1, 0) for modes in fleet.modules)


@pytest.mark.parametrize(("seed", "memory"), [*((n, False) for n in range(12)), *((n, True) for n in range(20, 32))])
def test_small_fleets_get_the_shortest_step_and_its_proof(seed: int, memory: bool) -> None:
    """As exhaustive search finds it; the baseline may exceed the memory, of which the least that is enough is named."""
    fleet = random_fleet(seed, memory=memory)
    best = shortest(fleet)
    assert memory or best is not None
    if best is not None:
        placed = place(fleet, [everywhere(fleet)], seconds=5)
        assert violations(fleet, placed.placement) == []
        assert placed.placement.makespan == placed.bound == best
        return
    least = min(max(memory_of(fleet, choices)) for choices in all_choices(fleet))
    with pytest.raises(InfeasiblePlanError, match=rf"the least that is enough is {least} bytes$"):
        place(fleet, [everywhere(fleet)], seconds=5)


def test_some_of_the_limits_are_infeasible_and_some_are_not() -> None:
    """Else the test above would prove half of what it says."""
    feasible = [shortest(random_fleet(seed, memory=True)) is not None for seed in range(20, 32)]
    assert 2 <= sum(feasible) <= len(feasible) - 2


@pytest.mark.parametrize("seed", range(12))
def test_without_the_solver_placements_are_valid_and_no_longer_than_the_start(seed: int) -> None:
    """And the bound holds, as that of a pool does, which has all placements, and more."""
    fleet = random_fleet(seed)
    start = Scheduler(fleet).best_of_orders(everywhere(fleet))
    placed = place(fleet, [everywhere(fleet)], seconds=0.2, use_solver=False)
    assert violations(fleet, placed.placement) == []
    best = shortest(fleet)
    assert best is not None and placed.bound <= best <= placed.placement.makespan <= start.makespan
    assert 0 < placement_model.search(fleet, is_pool=True, hint=start, bound=0, seconds=5).bound <= best


def test_the_planners_process_gives_the_same_answer() -> None:
    """Placements cross to it and back; errors too."""
    fleet = random_fleet(1)
    assert place_apart(fleet, [everywhere(fleet)], seconds=5).placement.makespan == shortest(fleet)
    full = next(fleet for seed in range(20, 32) if shortest(fleet := random_fleet(seed, memory=True)) is None)
    with pytest.raises(InfeasiblePlanError, match="the least that is enough is"):
        place_apart(full, [everywhere(full)], seconds=5)


def one_module(units: int) -> tuple[PlacementMode, ...]:
    """Return a module on one device."""
    return (PlacementMode(devices=1, units=units, memory=1),)


def test_modules_share_a_device_by_their_units() -> None:
    """Two halves run at once, a whole one after them, on one device."""
    tasks = tuple(PlacementTask(module=module, durations=(10,)) for module in range(3))
    fleet = Fleet(devices=1, units=4, memory=None, modules=tuple(map(one_module, (2, 2, 4))), tasks=tasks, arcs=())
    assert Scheduler(fleet).schedule([(0, 0)] * 3, [0, 1, 2]).starts == (0, 0, 10)


def test_every_kind_of_broken_rule_is_found() -> None:
    """By a text that names it."""
    modules = (one_module(1), (PlacementMode(devices=2, units=1, memory=1),))
    tasks = (PlacementTask(module=0, durations=(5,)), PlacementTask(module=1, durations=(4,)))
    fleet = Fleet(devices=2, units=1, memory=3, modules=modules, tasks=tasks, arcs=(Arc(0, 1),))

    def found(choices: tuple[Choice, ...], starts: tuple[int, ...], makespan: int) -> str:
        return "; ".join(violations(fleet, FleetPlacement(choices=choices, starts=starts, makespan=makespan)))

    assert found(((0, 1), (0, 0)), (0, 5), 9) == ""
    assert "makespan is 12" in found(((0, 1), (0, 0)), (0, 5), 12)
    assert "task 1 starts before task 0" in found(((0, 1), (0, 0)), (0, 4), 8)
    assert "uses 2 of 1 units" in found(((0, 1), (0, 0)), (0, 0), 5)
    assert "module 1 has mode 0 at device 1" in found(((0, 1), (0, 1)), (0, 5), 9)
    tight = FleetPlacement(choices=((0, 1), (0, 0)), starts=(0, 5), makespan=9)
    assert violations(replace(fleet, memory=1), tight) == ["a device holds 2 bytes of 1"]
