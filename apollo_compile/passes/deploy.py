"""Plan which devices compute the modules of a model: a deployment.

    plan_deployment(work, cluster) -> Deployment;  deploy_on(work, cluster, groups) -> Deployment

A module takes an aligned group of devices (1, 2, 4, ... or all) and some units of each. Replicas of it divide the
samples of a batch; a replica is on one device, or on several that divide its linear layers (tensor parallelism), or all
devices of the group share its state (sharded). Its calls run there, forward and backward; then gradients are summed
over the replicas, and every device updates the parameters that it has. A call sends its outputs to all devices, and in
the backward the gradients of its inputs: that is part of its time. A sum of gradients takes the units of its group,
which is pessimistic where it overlaps with other work. On a device, memory holds the state of its modules, and the
activations of its share of every call.

Baselines, from which the search begins and which the result is compared with:
    data parallel   every module on all devices, one after the other
    waves           modules level by level, those of a wave on disjoint groups as large as their work, and a barrier
                    between waves, after Wang et al., "Spindle", https://arxiv.org/abs/2409.03365; a module is not cut
                    into parts of several waves

Guarantees: a plan keeps the memory of every device; it is not longer than a baseline that keeps it, but for waves that
are not clearly better than data parallelism; bound <= step.
Leaves the times of calls to its caller, with the collectives inside of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apollo_compile.cost_model.collectives import Link, all_reduce_seconds, send_seconds
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.planner.apart import place_apart
from apollo_compile.planner.placement import (
    Arc,
    Choice,
    Fleet,
    FleetPlacement,
    PlacementMode,
    PlacementTask,
    Scheduler,
    duration_of,
    fits,
    groups_of,
    memory_of,
    violations,
)
from apollo_compile.units import format_bytes, seconds_to_ns

DATA_PARALLEL, WAVES = "data parallel", "waves"

REST = "code between the modules"
"""Name of the work that every rank does: the model's own code, small modules and the loss."""

LEAST_GAIN = 0.1
"""Share of the step of data parallelism by which another measured plan has to be predicted shorter: ratios of two
predictions have errors of a few percent on a quiet machine, and more on a busy one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualDevices:
    """Equal devices with equal links."""

    devices: int
    units: int
    """Units of each device."""
    memory_bytes: int | None
    """Memory of each device; None is no limit."""
    link: Link
    is_measured: bool = False
    """Whether times and link were measured; else they are given, and the plan is a simulation."""


def group_sizes(devices: int) -> tuple[int, ...]:
    """Return the numbers of devices of a group: powers of two, and all."""
    return tuple(sorted({*(1 << power for power in range(devices.bit_length())), devices}))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """A call of a module in the forward of a step; bytes are those of the whole batch."""

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
    """Nanoseconds of its forward, by mode of its module."""
    backward_ns: tuple[int, ...]
    """Nanoseconds of its backward, by mode of its module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How the devices of a group divide a module."""

    devices: int
    units: int
    """Units of each device."""
    tensor: int = 1
    """Devices of a replica, which divide its linear layers."""
    is_sharded: bool = False
    """Whether all devices share the parameters, and gather them where they are used."""

    @property
    def key(self) -> dict[str, Any]:
        """Its values by field."""
        return {name: getattr(self, name) for name in Division.__dataclass_fields__}

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
    """Interval in which a group works."""

    name: str
    """Name of the call, or of the module whose gradients are summed."""
    module: str
    kind: str
    """forward, backward or sum."""
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
    """Return the best deployment that is found; with measured times, data parallelism unless it is clearly better.

    Arguments:
        work: the calls of a step.
        cluster: the devices.
        seconds: time of the search.

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
    found = _to_deployment(work, cluster, fleet, placed.placement, placed.bound)
    usual = found.baselines[0]
    if cluster.is_measured and usual.keeps_memory and found.step_ns > (1 - LEAST_GAIN) * usual.step_ns:
        return deploy_on(work, cluster, usual.groups, known=found)
    return found


def deploy_on(
    work: StepWork, cluster: EqualDevices, groups: Sequence[DeviceGroup], *, known: Deployment | None = None
) -> Deployment:
    """Return the deployment on given groups, for example edited ones.

    Arguments:
        work: the calls of a step.
        cluster: the devices.
        groups: a group for every module.
        known: another deployment of this work, whose order is tried first and whose bound holds.

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
    scheduler = Scheduler(fleet)
    placement, bound_ns = scheduler.best_of_orders(choices), 0
    if known is not None:
        start_of = {(bar.name, bar.kind): bar.start_ns for bar in known.bars}
        starts = [start_of.get((name, kind), 0) for name, _, kind in _labels_of(work)]
        again = scheduler.schedule(choices, scheduler.order_of(starts))
        placement = min(again, placement, key=lambda each: each.makespan)
        bound_ns = min(known.bound_ns, placement.makespan)
    assert not violations(fleet, placement)
    return _to_deployment(work, cluster, fleet, placement, bound_ns)


# ---------------------------------------------------------------------------------------------- to the planner's fleet


def _labels_of(work: StepWork) -> list[tuple[str, str, str]]:
    """Return name, module and kind of the planner's tasks: forwards, backwards in reverse, sums of gradients."""
    return [
        *((call.name, call.module, "forward") for call in work.calls),
        *((call.name, call.module, "backward") for call in reversed(work.calls)),
        *((module.name, module.name, "sum") for module in work.modules),
    ]


def _to_fleet(work: StepWork, cluster: EqualDevices) -> Fleet:
    """Return the problem of the planner, with the tasks of `_labels_of`."""
    module_of = {module.name: index for index, module in enumerate(work.modules)}
    call_of: dict[str, int] = {}
    kept = [0 for _ in work.modules]
    for index, call in enumerate(work.calls):
        if unknown := [name for name in call.inputs if name not in call_of]:
            raise ConfigError(f"call {call.name!r} reads {unknown[0]!r}, which is no call before it")
        if call.module not in module_of or call.name in call_of:
            raise ConfigError(f"call {call.name!r} of module {call.module!r}: expected a known module, and a new name")
        call_of[call.name], module = index, module_of[call.module]
        modes = work.modules[module].modes
        if not len(call.forward_ns) == len(call.backward_ns) == len(modes):
            raise ConfigError(
                f"call {call.name!r} has {len(call.forward_ns)} times of forward and {len(call.backward_ns)} of "
                f"backward: expected one for each of {len(modes)} modes of {call.module!r}"
            )
        kept[module] += call.activation_bytes
    for each in work.modules:
        sizes = [mode.devices for mode in each.modes]
        broken = [mode for mode in each.modes if mode.devices % mode.tensor or mode.tensor * mode.is_sharded > 1]
        if not sizes or broken or max(sizes) > cluster.devices or all(call.module != each.name for call in work.calls):
            raise ConfigError(
                f"module {each.name!r} may have {sizes} devices: expected some numbers up to {cluster.devices}, "
                "multiples of those per replica, with one per replica if it is sharded, and a call of it"
            )

    def task(call: ModuleCall, own_ns: Sequence[int], num_bytes: int) -> PlacementTask:
        """Return work and its transfer, whose parts begin at once; every device receives all of them."""
        is_sent = num_bytes and cluster.devices > 1
        sent_ns = seconds_to_ns(send_seconds(num_bytes, cluster.link)) if is_sent else 0
        return PlacementTask(module=module_of[call.module], durations=tuple(ns + sent_ns for ns in own_ns))

    def sum_ns(mode: GroupMode) -> int:
        """Return the time of a module's sum of gradients, and of the update after it."""
        seconds = all_reduce_seconds(mode.gradient_bytes, mode.devices // mode.tensor, cluster.link)
        return mode.update_ns + (seconds_to_ns(seconds) if mode.gradient_bytes else 0)

    tasks = [
        *(task(call, call.forward_ns, call.sent_bytes) for call in work.calls),
        *(task(call, call.backward_ns, call.returned_bytes) for call in reversed(work.calls)),
        *(PlacementTask(module=i, durations=tuple(map(sum_ns, own.modes))) for i, own in enumerate(work.modules)),
    ]
    arcs, last = [], 2 * len(work.calls) - 1
    for index, call in enumerate(work.calls):
        arcs += [Arc(index, last - index), Arc(last - index, last + 1 + module_of[call.module])]
        for name in call.inputs:
            arcs += [Arc(call_of[name], index), Arc(last - index, last - call_of[name])]
    return Fleet(
        devices=cluster.devices,
        units=cluster.units,
        memory=cluster.memory_bytes,
        modules=tuple(
            tuple(
                PlacementMode(
                    devices=mode.devices,
                    units=mode.units,
                    memory=mode.state_bytes - (-num_bytes * mode.tensor // mode.devices),
                )
                for mode in module.modes
            )
            for module, num_bytes in zip(work.modules, kept, strict=True)
        ),
        tasks=tuple(tasks),
        arcs=tuple(arcs),
    )


# ---------------------------------------------------------------------------------------------------------- baselines


def _data_parallel(fleet: Fleet) -> tuple[Choice, ...]:
    """Return the choices with all devices and units, in the first of equal modes; or the most that a module can."""
    return tuple(
        (max(range(len(modes)), key=lambda index: (modes[index].devices, modes[index].units)), 0)
        for modes in fleet.modules
    )


def _waves(work: StepWork, fleet: Fleet) -> tuple[tuple[Choice, ...], Fleet]:
    """Return choices in which the modules of a level have disjoint groups, and the fleet with barriers between levels.

    A call without inputs has level 0; a module belongs to its first level.
    """
    levels: dict[str, int] = {}
    for call in work.calls:
        levels[call.name] = 1 + max((levels[name] for name in call.inputs), default=-1)
    last = 2 * len(levels) - 1
    barriers = [
        arc
        for (one, level), (other, later) in itertools.product(enumerate(levels.values()), repeat=2)
        if level < later
        for arc in (Arc(one, other), Arc(last - other, last - one))
    ]
    level_of: dict[int, int] = {}
    for task, level in zip(fleet.tasks, levels.values(), strict=False):
        level_of[task.module] = min(level, level_of.get(task.module, level))
    found: dict[int, Choice] = {}
    for level in sorted(set(level_of.values())):
        wave: list[int] = []
        for module in sorted(module for module, own in level_of.items() if own == level):
            if sum(min(mode.devices for mode in fleet.modules[each]) for each in (*wave, module)) > fleet.devices:
                found |= _wave(fleet, wave)
                wave = []
            wave.append(module)
        found |= _wave(fleet, wave)
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


# ------------------------------------------------------------------------------------------------------- to the result


def _to_deployment(
    work: StepWork, cluster: EqualDevices, fleet: Fleet, placement: FleetPlacement, bound: int
) -> Deployment:
    placement = Scheduler(fleet).settle(placement)
    ends = [start + duration_of(fleet, task, placement.choices) for task, start in enumerate(placement.starts)]
    bars = [
        WorkInterval(name=name, module=module, kind=kind, start_ns=start, end_ns=end)
        for (name, module, kind), start, end in zip(_labels_of(work), placement.starts, ends, strict=True)
        if end > start
    ]

    def groups(choices: Sequence[Choice]) -> tuple[DeviceGroup, ...]:
        return tuple(
            DeviceGroup(module=module.name, first=first, **module.modes[mode].key)
            for module, (mode, first) in zip(work.modules, choices, strict=True)
        )

    in_turn, (waves, with_barriers) = _data_parallel(fleet), _waves(work, fleet)
    baselines = (
        (DATA_PARALLEL, Scheduler(fleet).schedule(in_turn, range(len(fleet.tasks)))),
        (WAVES, Scheduler(with_barriers).best_of_orders(waves)),
    )
    return Deployment(
        cluster=cluster,
        work=work,
        groups=groups(placement.choices),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_ns)),
        step_ns=placement.makespan,
        bound_ns=bound,
        memory_bytes=tuple(memory_of(fleet, placement.choices)),
        baselines=tuple(
            Baseline(
                name=name, step_ns=each.makespan, groups=groups(each.choices), keeps_memory=fits(fleet, each.choices)
            )
            for name, each in baselines
        ),
    )
