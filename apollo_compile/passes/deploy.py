"""Plan which devices compute the modules of a model: a deployment.

    plan_deployment(work, cluster) -> Deployment;  deploy_on(work, cluster, groups) -> Deployment

A module takes an aligned group of devices (1, 2, 4, ... or all) and some units of each. Replicas of it divide the
samples of a batch; a replica is on one device, or on several that divide its linear layers (tensor parallelism), or all
devices of the group share its state (sharded). Its calls run there, forward and backward; then gradients are summed
over the replicas, and every device updates the parameters that it has. Transfers of outputs, and of gradients of
inputs, to all devices are part of a call's time. A sum of gradients takes the units of its group, which is pessimistic
where it overlaps with other work. Memory holds the state of modules, and activations of a device's share of every call.

Baselines, from which the search begins and which the result is compared with:
    data parallel   every module on all devices, one after the other
    waves           modules level by level, those of a wave on disjoint groups as large as their work, and a barrier
                    between waves, after Wang et al., "Spindle", https://arxiv.org/abs/2409.03365, but modules are whole

Guarantees: a plan keeps the memory of every device; it is not longer than a baseline that keeps it, but for waves that
are not clearly better than data parallelism; bound <= step.
Leaves the times of calls to its caller, with the collectives inside of a call.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from apollo_compile.cost_model.collectives import Link, all_reduce_seconds, send_seconds
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.planner.apart import place_apart
from apollo_compile.planner.fleet import (
    Arc,
    Choice,
    Fleet,
    PlacementMode,
    PlacementTask,
    Scheduler,
    duration_of,
    fits,
    groups_of,
    memory_of,
)
from apollo_compile.units import format_bytes, seconds_to_ns

REST = "code between the modules"
"""Name of the work that every rank does: the model's own code, small modules and the loss."""

LEAST_GAIN = 0.1
"""Share of the step of data parallelism by which another measured plan has to be shorter: predictions have errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualDevices:
    """Equal devices with equal links; units and memory are those of each, and no memory is no limit."""

    devices: int
    units: int
    memory_bytes: int | None
    link: Link
    is_measured: bool = False
    """Whether times and link were measured; else they are given, and the plan is a simulation."""


def group_sizes(devices: int) -> tuple[int, ...]:
    """Return the numbers of devices of a group: powers of two, and all."""
    return tuple(sorted({*(1 << power for power in range(devices.bit_length())), devices}))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """A call of a module in the forward of a step; bytes are those of the whole batch, times are by its mode."""

    name: str
    module: str
    inputs: tuple[str, ...]
    """Earlier calls whose outputs it reads."""
    sent_bytes: int = 0
    """Outputs that go to all devices in the forward."""
    returned_bytes: int = 0
    """Gradients of inputs that go to all devices in the backward."""
    activation_bytes: int = 0
    """Tensors that the backward needs."""
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How the devices of a group divide a module, with some units of each."""

    devices: int
    units: int
    tensor: int = 1
    """Devices of a replica, which divide its linear layers."""
    is_sharded: bool = False
    """Whether all devices share the parameters, and gather them where they are used."""

    @property
    def key(self) -> dict[str, Any]:
        """Its values by field."""
        return {name: getattr(self, name) for name in Division.__dataclass_fields__}

    @property
    def replicas(self) -> int:
        """Number of parts into which samples are divided."""
        return self.devices // self.tensor

    def __str__(self) -> str:
        """Return for example `4 with 1 units, 2 per replica`."""
        return f"{self.devices} with {self.units} units{self.kind}"

    @property
    def kind(self) -> str:
        """Words after a place, empty for plain replicas."""
        return ", sharded" * self.is_sharded + f", {self.tensor} per replica" * (self.tensor > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMode(Division):
    """A division that a module may have; bytes are those on each device."""

    state_bytes: int
    """Parameters, gradients and states of the optimizer."""
    gradient_bytes: int
    """Bytes that are summed over the replicas in a step; 0 if the module is frozen or sharded."""
    update_ns: int = 0
    """Time of the optimizer's update on each device, after the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearPair:
    """Linear layers that devices may divide: each has some outputs of `columns`, which are its inputs of `row`."""

    columns: tuple[str, ...]
    row: str
    degree: int
    """Most devices, a power of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleState:
    """A module, and how it may run."""

    name: str
    modes: tuple[GroupMode, ...]
    """Divisions that it may have; of those with equal devices and units, baselines take the first."""
    pairs: tuple[LinearPair, ...] = ()
    """Layers that the devices of a replica divide."""


def replicated(name: str, groups: Iterable[tuple[int, int]], **own: Any) -> ModuleState:
    """Return a module with a replica on every device; groups are devices and units, `own` is the rest of a mode."""
    return ModuleState(name=name, modes=tuple(GroupMode(devices=n, units=units, **own) for n, units in groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """The calls of a step in the order of the forward, and the modules that they run."""

    modules: tuple[ModuleState, ...]
    calls: tuple[ModuleCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup(Division):
    """Devices of a module, and how they divide it."""

    module: str
    first: int

    @property
    def range(self) -> range:
        """Its devices."""
        return range(self.first, self.first + self.devices)

    def __str__(self) -> str:
        """Return for example `devices 4 to 7, sharded`."""
        place = f"device {self.first}" if self.devices == 1 else f"devices {self.first} to {self.range[-1]}"
        return place + self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkInterval:
    """Interval in which a group works: forward or backward of a call, or sum of the gradients of a module."""

    name: str
    module: str
    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A deployment by a fixed rule."""

    name: str
    step_ns: int
    groups: tuple[DeviceGroup, ...]
    keeps_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """The groups of all modules, and the predicted step."""

    cluster: EqualDevices
    work: StepWork
    groups: tuple[DeviceGroup, ...]
    """Groups by module, in the order of `work.modules`."""
    bars: tuple[WorkInterval, ...]
    """Runs of modules, by start."""
    step_ns: int
    bound_ns: int
    """Proven lower bound of the step of every deployment."""
    memory_bytes: tuple[int, ...]
    """Bytes by device."""
    baselines: tuple[Baseline, ...]

    @property
    def gap(self) -> float:
        """Share of the step by which it may be longer than the best possible."""
        return 1 - self.bound_ns / self.step_ns if self.step_ns else 0.0


def plan_deployment(work: StepWork, cluster: EqualDevices, *, seconds: float = 10.0) -> Deployment:
    """Return the best deployment found in some seconds; with measured times, data parallelism unless clearly better.

    Raises:
        ConfigError: a call has no time for any group, or reads a call that does not come before it.
        InfeasiblePlanError: no deployment keeps the memory; the message has the least that is enough.
    """
    fleet = _to_fleet(work, cluster)
    try:
        placed = place_apart(fleet, [_data_parallel(fleet), _waves(work, fleet)[0]], seconds=seconds)
    except InfeasiblePlanError as error:
        needs = [min(mode.memory for mode in modes) for modes in fleet.modules]
        least, name = max(needs), work.modules[needs.index(max(needs))].name
        raise InfeasiblePlanError(
            f"{error}; {name!r} alone needs {least} bytes ({format_bytes(least)}) on each device of its largest group; "
            "raise the memory, or take a smaller batch or more devices"
        ) from error
    found = _to_deployment(work, cluster, fleet, placed.placement.choices, placed.placement.starts, placed.bound)
    usual = found.baselines[0]
    if cluster.is_measured and usual.keeps_memory and found.step_ns > (1 - LEAST_GAIN) * usual.step_ns:
        return deploy_on(work, cluster, usual.groups, known=found)
    return found


def deploy_on(
    work: StepWork, cluster: EqualDevices, groups: Sequence[DeviceGroup], *, known: Deployment | None = None
) -> Deployment:
    """Return the deployment with a given group for every module, for example edited ones.

    The order of a known deployment of this work is tried first, and its bound holds.

    Raises:
        ConfigError: a module has no group, or one that it cannot have.
        InfeasiblePlanError: the groups exceed the memory of a device.
    """
    fleet = _to_fleet(work, cluster)
    by_name = {group.module: group for group in groups}
    choices: list[Choice] = []
    for module, modes in zip(work.modules, fleet.modules, strict=True):
        group = by_name.get(module.name)
        if group is None:
            raise ConfigError(f"module {module.name!r} has no group; there are groups for {', '.join(by_name)}")
        keys = [mode.key for mode in module.modes]
        if group.key not in keys or group.first not in groups_of(fleet, modes[keys.index(group.key)]):
            raise ConfigError(
                f"module {module.name!r} cannot have {group.devices} devices with {group.units} units{group.kind} from "
                f"device {group.first} on: expected a first device that is a multiple of their number, below "
                f"{cluster.devices}, and a number of devices out of " + "; ".join(map(str, module.modes))
            )
        choices.append((keys.index(group.key), group.first))
    if not fits(fleet, choices):
        held = memory_of(fleet, choices)
        raise InfeasiblePlanError(
            f"device {held.index(max(held))} would hold {format_bytes(max(held))}, and has "
            f"{format_bytes(fleet.memory or 0)}: give its modules to other devices"
        )
    bars, bound_ns = ((), 0) if known is None else (known.bars, known.bound_ns)
    start_of: dict[tuple[str, ...], int] = {(bar.name, bar.kind): bar.start_ns for bar in bars}
    starts = [start_of.get(task.label, 0) for task in fleet.tasks]
    return _to_deployment(work, cluster, fleet, choices, starts, bound_ns)


def _to_fleet(work: StepWork, cluster: EqualDevices) -> Fleet:
    """Return the problem of the planner: forwards, backwards in reverse, and sums of gradients; labels say which."""
    _check(work, cluster)
    module_of = {module.name: index for index, module in enumerate(work.modules)}
    kept: Counter[str] = Counter()
    for call in work.calls:
        kept[call.module] += call.activation_bytes

    def task(call: ModuleCall, kind: str, own_ns: Sequence[int], num_bytes: int) -> PlacementTask:
        """Return work and its transfer, whose parts begin at once; every device receives all of them."""
        sent_ns = seconds_to_ns(send_seconds(num_bytes, cluster.link)) if num_bytes and cluster.devices > 1 else 0
        durations = tuple(ns + sent_ns for ns in own_ns)
        return PlacementTask(module=module_of[call.module], durations=durations, label=(call.name, kind))

    def sum_of(module: ModuleState) -> PlacementTask:
        """Return the sum of a module's gradients, with the update after it."""
        durations = []
        for mode in module.modes:
            seconds = all_reduce_seconds(mode.gradient_bytes, mode.replicas, cluster.link)
            durations.append(mode.update_ns + (seconds_to_ns(seconds) if mode.gradient_bytes else 0))
        return PlacementTask(module=module_of[module.name], durations=tuple(durations), label=(module.name, "sum"))

    def placement_mode(name: str, mode: GroupMode) -> PlacementMode:
        memory = mode.state_bytes - (-kept[name] // mode.replicas)
        return PlacementMode(devices=mode.devices, units=mode.units, memory=memory)

    tasks = (
        *(task(call, "forward", call.forward_ns, call.sent_bytes) for call in work.calls),
        *(task(call, "backward", call.backward_ns, call.returned_bytes) for call in reversed(work.calls)),
        *map(sum_of, work.modules),
    )
    number = {task.label: index for index, task in enumerate(tasks)}
    arcs: list[Arc] = []
    for call in work.calls:
        forward, backward = number[call.name, "forward"], number[call.name, "backward"]
        arcs += [Arc(forward, backward), Arc(backward, number[call.module, "sum"])]
        for name in call.inputs:
            arcs += [Arc(number[name, "forward"], forward), Arc(backward, number[name, "backward"])]
    return Fleet(
        devices=cluster.devices,
        units=cluster.units,
        memory=cluster.memory_bytes,
        modules=tuple(tuple(placement_mode(own.name, mode) for mode in own.modes) for own in work.modules),
        tasks=tasks,
        arcs=tuple(arcs),
    )


def _check(work: StepWork, cluster: EqualDevices) -> None:
    """Raise a `ConfigError` if calls or modules of a step cannot be."""
    modes_of = {module.name: module.modes for module in work.modules}
    known = set[str]()
    for call in work.calls:
        if unknown := [name for name in call.inputs if name not in known]:
            raise ConfigError(f"call {call.name!r} reads {unknown[0]!r}, which is no call before it")
        if call.module not in modes_of or call.name in known:
            raise ConfigError(f"call {call.name!r} of module {call.module!r}: expected a known module, and a new name")
        known.add(call.name)
        if not len(call.forward_ns) == len(call.backward_ns) == len(modes_of[call.module]):
            raise ConfigError(
                f"call {call.name!r} has {len(call.forward_ns)} times of forward and {len(call.backward_ns)} of "
                f"backward: expected one for each of {len(modes_of[call.module])} modes of {call.module!r}"
            )
    for name, modes in modes_of.items():
        sizes = [mode.devices for mode in modes]
        broken = [mode for mode in modes if mode.devices % mode.tensor or mode.tensor * mode.is_sharded > 1]
        if not sizes or broken or max(sizes) > cluster.devices or all(call.module != name for call in work.calls):
            raise ConfigError(
                f"module {name!r} may have {sizes} devices: expected some numbers up to {cluster.devices}, "
                "multiples of those per replica, with one per replica if it is sharded, and a call of it"
            )


def _data_parallel(fleet: Fleet) -> tuple[Choice, ...]:
    """Return the choices with all devices and units, in the first of equal modes; or the most that a module can."""
    best = (max(range(len(modes)), key=lambda n: (modes[n].devices, modes[n].units)) for modes in fleet.modules)
    return tuple((mode, 0) for mode in best)


def _waves(work: StepWork, fleet: Fleet) -> tuple[tuple[Choice, ...], Fleet]:
    """Return choices in which the modules of a level have disjoint groups, and the fleet with barriers between levels.

    A call without inputs has level 0; a module belongs to its first level.
    """
    level_of: dict[str, int] = {}
    for call in work.calls:
        level_of[call.name] = 1 + max((level_of[name] for name in call.inputs), default=-1)
    levels, last = list(level_of.values()), 2 * len(level_of) - 1
    barriers = [
        arc
        for one, other in itertools.permutations(range(len(levels)), 2)
        if levels[one] < levels[other]
        for arc in (Arc(one, other), Arc(last - other, last - one))
    ]
    least = [min(mode.devices for mode in modes) for modes in fleet.modules]
    found: dict[int, Choice] = {}
    for level in sorted(set(levels)):
        modules = {task.module for task, own in zip(fleet.tasks, levels, strict=False) if own == level}
        left = sorted(modules - found.keys())
        while left:  # as many as there are devices for
            count = bisect.bisect(list(itertools.accumulate(least[module] for module in left)), fleet.devices)
            found |= _wave(fleet, left[:count])
            left = left[count:]
    return tuple(found[module] for module in range(len(fleet.modules))), replace(fleet, arcs=(*fleet.arcs, *barriers))


def _wave(fleet: Fleet, members: Sequence[int]) -> dict[int, Choice]:
    """Return disjoint groups: the module that takes longest gets more devices as long as there are some."""
    sizes: dict[int, list[tuple[int, int, int]]] = {}
    """Numbers of devices that a module may have, smallest first, with its mode with most units and its time."""
    for module in members:
        modes = sorted((mode.devices, mode.units, -number) for number, mode in enumerate(fleet.modules[module]))
        times = [task.durations for task in fleet.tasks if task.module == module]
        mode_of = {devices: -number for devices, _, number in modes}
        sizes[module] = [(devices, mode, sum(time[mode] for time in times)) for devices, mode in mode_of.items()]
    free = fleet.devices - sum(own[0][0] for own in sizes.values())

    def can_grow(module: int) -> bool:
        (devices, _, time), *larger = sizes[module]
        return bool(larger) and larger[0][0] - devices <= free and larger[0][2] < time

    while able := list(filter(can_grow, members)):
        slowest = max(able, key=lambda module: (sizes[module][0][2], -module))
        free += sizes[slowest].pop(0)[0] - sizes[slowest][0][0]
    found, first = {}, 0
    for module in sorted(members, key=lambda each: (-sizes[each][0][0], each)):  # so all groups are aligned
        devices, mode, _ = sizes[module][0]
        found[module] = (mode, first)
        first += devices
    return found


def _to_deployment(
    work: StepWork, cluster: EqualDevices, fleet: Fleet, choices: Sequence[Choice], starts: Sequence[int], bound: int
) -> Deployment:
    """Return the deployment with tasks in the order of some starts, or in another if that is shorter."""
    scheduler = Scheduler(fleet)
    given = scheduler.schedule(choices, scheduler.order_of(starts))
    placement = scheduler.settle(min(given, scheduler.best_of_orders(choices), key=attrgetter("makespan")))
    bars = []
    for number, (task, start) in enumerate(zip(fleet.tasks, placement.starts, strict=True)):
        (name, kind), end = task.label, start + duration_of(fleet, number, placement.choices)
        if end > start:
            module = work.modules[task.module].name
            bars.append(WorkInterval(name=name, module=module, kind=kind, start_ns=start, end_ns=end))

    def groups(choices: Sequence[Choice]) -> tuple[DeviceGroup, ...]:
        return tuple(
            DeviceGroup(module=module.name, first=first, **module.modes[mode].key)
            for module, (mode, first) in zip(work.modules, choices, strict=True)
        )

    waves, with_barriers = _waves(work, fleet)
    baselines = {
        "data parallel": scheduler.schedule(_data_parallel(fleet), range(len(fleet.tasks))),
        "waves": Scheduler(with_barriers).best_of_orders(waves),
    }
    return Deployment(
        cluster=cluster,
        work=work,
        groups=groups(placement.choices),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_ns)),
        step_ns=placement.makespan,
        bound_ns=min(bound, placement.makespan),
        memory_bytes=tuple(memory_of(fleet, placement.choices)),
        baselines=tuple(
            Baseline(name=name, step_ns=own.makespan, groups=groups(own.choices), keeps_memory=fits(fleet, own.choices))
            for name, own in baselines.items()
        ),
    )
