"""Plan which devices compute the modules of a model: a deployment.

    plan_deployment(work, cluster) -> Deployment;  deploy_on(work, cluster, groups) -> Deployment

A module takes an aligned group of devices (1, 2, 4, ... or all), over which the samples of a batch are divided, and
some units of each device. Its calls run there, forward and backward; then its gradients are summed over the group, and
its parameters are updated on every device of it. A call begins when its inputs have arrived: between different groups
they travel, forward outputs and backward gradients alike, and every device of the smaller group moves its share. A sum
of gradients takes the units of its group, which is pessimistic where it overlaps with other work. On a device, memory
holds the state of its modules, and the activations of its share of every call.

Baselines, from which the search begins and which the result is compared with:
    data parallel   every module on all devices, one after the other
    waves           modules level by level, those of a wave on disjoint groups as large as their work, and a barrier
                    between waves, after Wang et al., "Spindle", https://arxiv.org/abs/2409.03365; a module is not cut
                    into parts of several waves

Guarantees: a plan keeps the memory of every device; it is not longer than a baseline that keeps it; bound <= step.
Leaves the times of calls to its caller. Tensor parallelism inside a group is not planned.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from apollo_compile.cost_model.collectives import Link, all_reduce_seconds, send_seconds
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.planner.apart import place_apart
from apollo_compile.planner.placement import (
    Arc,
    Choice,
    Fleet,
    Mode,
    Placement,
    Scheduler,
    Task,
    fits,
    memory_of,
    violations,
)
from apollo_compile.units import format_bytes, seconds_to_ns

DATA_PARALLEL, WAVES = "data parallel", "waves"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal devices with equal links."""

    devices: int
    units: int
    """Units of each device."""
    memory_bytes: int | None
    """Memory of each device; None is no limit."""
    link: Link
    is_measured: bool = False
    """Whether times and link were measured; else they are given, and the plan is a simulation."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices of a group: powers of two, and all."""
        powers = [1 << power for power in range(self.devices.bit_length())]
        return tuple(sorted({*(size for size in powers if size <= self.devices), self.devices}))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTime:
    """Time of a call on a group."""

    devices: int
    units: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a module in the forward of a step."""

    name: str
    module: str
    inputs: tuple[str, ...]
    """Earlier calls whose outputs it reads."""
    output_bytes: int
    """Bytes that travel to another group, for the whole batch; 0 if the times include that."""
    activation_bytes: int
    """Bytes that the backward needs, for the whole batch."""
    outputs: tuple[int, ...] = ()
    """Output tensors that are used after it."""
    times: tuple[CallTime, ...]
    """By group that may run it; all calls of a module have times for the same groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleState:
    """Memory that a module keeps on each of its devices."""

    name: str
    state_bytes: int
    """Parameters, gradients and states of the optimizer."""
    gradient_bytes: int
    """Bytes that are summed over its group in a step; 0 if it is frozen."""
    update_ns: int = 0
    """Time of the optimizer's update on each device, after the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """The calls of a step in the order of the forward, and the modules that they run."""

    modules: tuple[ModuleState, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Where a module runs."""

    module: str
    first: int
    devices: int
    """Number of devices, which is the degree of data parallelism."""
    units: int
    """Units of each device."""

    def __str__(self) -> str:
        """Return for example `devices 4 to 7`."""
        last = self.first + self.devices - 1
        return f"device {last}" if self.devices == 1 else f"devices {self.first} to {last}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
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
    groups: tuple[Group, ...]
    keeps_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """The groups of all modules, and the predicted step."""

    cluster: Cluster
    work: StepWork
    groups: tuple[Group, ...]
    """By module, in the order of `work.modules`."""
    bars: tuple[Bar, ...]
    """Runs of modules, by start."""
    step_ns: int
    bound_ns: int
    """Proven lower bound of the step of every deployment."""
    memory_bytes: tuple[int, ...]
    """By device."""
    baselines: tuple[Baseline, ...]

    @property
    def gap(self) -> float:
        """Share of the step by which it may be longer than the best possible."""
        return 1 - self.bound_ns / self.step_ns if self.step_ns else 0.0


def plan_deployment(work: StepWork, cluster: Cluster, *, seconds: float = 10.0) -> Deployment:
    """Return the best deployment that is found.

    Arguments:
        work: the calls of a step.
        cluster: the devices.
        seconds: time of the search.

    Raises:
        ConfigError: a call has no time for any group, or reads a call that does not come before it.
        InfeasiblePlanError: no deployment keeps the memory; the message has the least that is enough.
    """
    fleet, levels = _to_fleet(work, cluster), _levels_of(work)
    starts = [_data_parallel(fleet), _waves(fleet, levels)]
    try:
        placed = place_apart(fleet, starts, seconds=seconds)
    except InfeasiblePlanError as error:
        raise _explain(error, work, fleet) from error
    return _to_deployment(work, cluster, fleet, placed.placement, placed.bound)


def deploy_on(
    work: StepWork, cluster: Cluster, groups: Sequence[Group], *, like: Sequence[Bar] = (), bound_ns: int = 0
) -> Deployment:
    """Return the deployment on given groups, for example edited ones.

    Arguments:
        work: the calls of a step.
        cluster: the devices.
        groups: a group for every module.
        like: bars whose order is tried first.
        bound_ns: a known lower bound of the step of every deployment.

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
        mode = next(
            (index for index, m in enumerate(modes) if (m.devices, m.units) == (group.devices, group.units)), None
        )
        if mode is None or group.first % group.devices or not 0 <= group.first <= cluster.devices - group.devices:
            known = ", ".join(f"{m.devices} with {m.units} units" for m in modes)
            raise ConfigError(
                f"module {module.name!r} cannot have {group.devices} devices with {group.units} units from device "
                f"{group.first} on: expected a first device that is a multiple of their number, below "
                f"{cluster.devices}, and a number of devices out of {known}"
            )
        choices.append((mode, group.first))
    if not fits(fleet, choices):
        held = memory_of(fleet, choices)
        raise InfeasiblePlanError(
            f"device {held.index(max(held))} would hold {format_bytes(max(held))}, and has "
            f"{format_bytes(fleet.memory or 0)}: give its modules to other devices"
        )
    scheduler = Scheduler(fleet)
    found = [scheduler.best_of_orders(choices)]
    if like:
        start_of = {(bar.name, bar.kind): bar.start_ns for bar in like}
        starts = [start_of.get((name, kind), 0) for name, _, kind in _labels_of(work)]
        found.insert(0, scheduler.schedule(choices, scheduler.order_of(starts)))
    placement = min(found, key=lambda each: each.makespan)
    assert not violations(fleet, placement)
    return _to_deployment(work, cluster, fleet, placement, min(bound_ns, placement.makespan))


def _explain(error: InfeasiblePlanError, work: StepWork, fleet: Fleet) -> InfeasiblePlanError:
    """Return an error that names the module that needs most."""
    least = [min(mode.memory for mode in modes) for modes in fleet.modules]
    largest = least.index(max(least))
    return InfeasiblePlanError(
        f"{error}; {work.modules[largest].name!r} alone needs {least[largest]} bytes ({format_bytes(least[largest])}) "
        "on each device of its largest group; raise the memory, or take a smaller batch or more devices"
    )


# ---------------------------------------------------------------------------------------------- to the planner's fleet


def _to_fleet(work: StepWork, cluster: Cluster) -> Fleet:
    """Return the problem of the planner: forwards, then backwards in reverse, then sums of gradients."""
    module_of = {module.name: index for index, module in enumerate(work.modules)}
    call_of: dict[str, int] = {}
    times_of: dict[str, list[CallTime]] = {}
    groups: list[list[tuple[int, int]]] = [[] for _ in work.modules]
    for index, call in enumerate(work.calls):
        if unknown := [name for name in call.inputs if name not in call_of]:
            raise ConfigError(f"call {call.name!r} reads {unknown[0]!r}, which is no call before it")
        if call.module not in module_of or call.name in call_of:
            raise ConfigError(f"call {call.name!r} of module {call.module!r}: expected a known module, and a new name")
        call_of[call.name] = index
        times_of[call.name] = [time for time in call.times if time.devices <= cluster.devices]
        own = [(time.devices, time.units) for time in times_of[call.name]]
        if not own or groups[module_of[call.module]] not in ([], own):
            raise ConfigError(
                f"call {call.name!r} has times for groups {own}: expected some with at most {cluster.devices} "
                f"devices, the same for all calls of {call.module!r}"
            )
        groups[module_of[call.module]] = own
    if silent := [module.name for module, own in zip(work.modules, groups, strict=True) if not own]:
        raise ConfigError(f"module {silent[0]!r} is not called")
    modes = []
    for module, own in zip(work.modules, groups, strict=True):
        kept = sum(call.activation_bytes for call in work.calls if call.module == module.name)
        modes.append(tuple(Mode(devices=n, units=units, memory=module.state_bytes + -(-kept // n)) for n, units in own))
    count = len(work.calls)
    tasks = [
        Task(module=module_of[call.module], durations=tuple(time.forward_ns for time in times_of[call.name]))
        for call in work.calls
    ]
    tasks += [
        Task(module=module_of[call.module], durations=tuple(time.backward_ns for time in times_of[call.name]))
        for call in reversed(work.calls)
    ]
    tasks += [
        Task(
            module=index,
            durations=tuple(_sum_ns(module, mode.devices, cluster) for mode in modes[index]),
        )
        for index, module in enumerate(work.modules)
    ]
    arcs = []
    for index, call in enumerate(work.calls):
        backward = 2 * count - 1 - index
        arcs += [Arc(index, backward, {}), Arc(backward, 2 * count + module_of[call.module], {})]
        for name in call.inputs:
            delays = _delays(work.calls[call_of[name]].output_bytes, cluster)
            arcs.append(Arc(call_of[name], index, delays))
            arcs.append(Arc(backward, 2 * count - 1 - call_of[name], delays))
    return Fleet(
        devices=cluster.devices,
        units=cluster.units,
        memory=cluster.memory_bytes,
        modules=tuple(modes),
        tasks=tuple(tasks),
        arcs=tuple(arcs),
    )


def _sum_ns(module: ModuleState, devices: int, cluster: Cluster) -> int:
    """Return the time to sum gradients over a group, and to update."""
    seconds = all_reduce_seconds(module.gradient_bytes, devices, cluster.link) if module.gradient_bytes else 0.0
    return seconds_to_ns(seconds) + module.update_ns


@functools.lru_cache(maxsize=256)
def _delays(num_bytes: int, cluster: Cluster) -> Mapping[tuple[int, int], int]:
    """Return the time of a transfer by the numbers of devices of both groups."""
    return {
        (one, other): seconds_to_ns(send_seconds(num_bytes / min(one, other), cluster.link)) if num_bytes else 0
        for one in cluster.sizes
        for other in cluster.sizes
    }


# ---------------------------------------------------------------------------------------------------------- baselines


def _data_parallel(fleet: Fleet) -> tuple[Choice, ...]:
    """Return the choices with all devices and units; of a module that cannot have them, the most it can."""
    return tuple(
        (max(range(len(modes)), key=lambda index: (modes[index].devices, modes[index].units)), 0)
        for modes in fleet.modules
    )


def _levels_of(work: StepWork) -> tuple[int, ...]:
    """Return the level of every call: calls without inputs have 0."""
    levels: dict[str, int] = {}
    for call in work.calls:
        levels[call.name] = 1 + max((levels[name] for name in call.inputs), default=-1)
    return tuple(levels.values())


def _waves(fleet: Fleet, levels: Sequence[int]) -> tuple[Choice, ...]:
    """Return choices in which the modules of a level have disjoint groups; a module belongs to its first level."""
    level_of: dict[int, int] = {}
    for call, level in enumerate(levels):
        module = fleet.tasks[call].module
        level_of[module] = min(level, level_of.get(module, level))
    modes_of: dict[int, dict[int, int]] = {}
    """By module and number of devices, the mode with most units."""
    for module, modes in enumerate(fleet.modules):
        modes_of[module] = {mode.devices: index for index, mode in sorted(enumerate(modes), key=lambda m: m[1].units)}
    found: dict[int, Choice] = {}
    for level in sorted(set(level_of.values())):
        members = sorted(module for module in level_of if level_of[module] == level)
        wave: list[int] = []
        for module in members:
            if sum(min(modes_of[each]) for each in (*wave, module)) > fleet.devices:
                found |= _wave(fleet, wave, modes_of)
                wave = []
            wave.append(module)
        found |= _wave(fleet, wave, modes_of)
    return tuple(found[module] for module in range(len(fleet.modules)))


def _wave(fleet: Fleet, members: Sequence[int], modes_of: Mapping[int, Mapping[int, int]]) -> dict[int, Choice]:
    """Return disjoint groups: the module that takes longest gets more devices as long as there are some."""
    sizes = {module: min(modes_of[module]) for module in members}

    def time_of(module: int) -> int:
        mode = modes_of[module][sizes[module]]
        return sum(task.durations[mode] for task in fleet.tasks if task.module == module)

    growing = set(members)
    while growing:
        module = max(growing, key=lambda each: (time_of(each), -each))
        size = sizes[module]
        larger = min((other for other in modes_of[module] if other > size), default=0)
        after = {**sizes, module: larger}
        if not larger or sum(after.values()) > fleet.devices or time_of(module) <= 0:
            growing.discard(module)
            continue
        before, sizes[module] = time_of(module), larger
        if time_of(module) >= before:
            sizes[module] = size
            growing.discard(module)
    found, first = {}, 0
    for module in sorted(members, key=lambda each: (-sizes[each], each)):  # larger groups first: all are aligned
        found[module] = (modes_of[module][sizes[module]], first)
        first += sizes[module]
    return found


def _barriers(fleet: Fleet, levels: Sequence[int]) -> Fleet:
    """Return the fleet with a barrier between the levels, forward and backward."""
    count = len(levels)
    arcs = [
        arc
        for one, level in enumerate(levels)
        for other, later in enumerate(levels)
        if level < later
        for arc in (Arc(one, other, {}), Arc(2 * count - 1 - other, 2 * count - 1 - one, {}))
    ]
    return replace(fleet, arcs=(*fleet.arcs, *arcs))


def _baselines(work: StepWork, fleet: Fleet) -> tuple[Baseline, ...]:
    levels = _levels_of(work)
    in_turn, waves = _data_parallel(fleet), _waves(fleet, levels)
    steps = (
        (DATA_PARALLEL, in_turn, Scheduler(fleet).schedule(in_turn, range(len(fleet.tasks))).makespan),
        (WAVES, waves, Scheduler(_barriers(fleet, levels)).best_of_orders(waves).makespan),
    )
    return tuple(
        Baseline(name=name, step_ns=step_ns, groups=_groups_of(work, fleet, choices), keeps_memory=fits(fleet, choices))
        for name, choices, step_ns in steps
    )


# ------------------------------------------------------------------------------------------------------- to the result


def _groups_of(work: StepWork, fleet: Fleet, choices: Sequence[Choice]) -> tuple[Group, ...]:
    return tuple(
        Group(module=module.name, first=first, devices=modes[mode].devices, units=modes[mode].units)
        for module, modes, (mode, first) in zip(work.modules, fleet.modules, choices, strict=True)
    )


def _labels_of(work: StepWork) -> list[tuple[str, str, str]]:
    """Return name, module and kind of the planner's tasks, in their order."""
    calls = [*((call, "forward") for call in work.calls), *((call, "backward") for call in reversed(work.calls))]
    labels = [(call.name, call.module, kind) for call, kind in calls]
    return labels + [(module.name, module.name, "sum") for module in work.modules]


def _to_deployment(work: StepWork, cluster: Cluster, fleet: Fleet, placement: Placement, bound: int) -> Deployment:
    placement = Scheduler(fleet).settle(placement)
    bars = [
        Bar(
            name=name,
            module=module,
            kind=kind,
            start_ns=start,
            end_ns=start + fleet.tasks[task].durations[placement.choices[fleet.tasks[task].module][0]],
        )
        for task, ((name, module, kind), start) in enumerate(zip(_labels_of(work), placement.starts, strict=True))
    ]
    return Deployment(
        cluster=cluster,
        work=work,
        groups=_groups_of(work, fleet, placement.choices),
        bars=tuple(sorted((bar for bar in bars if bar.end_ns > bar.start_ns), key=lambda bar: bar.start_ns)),
        step_ns=placement.makespan,
        bound_ns=bound,
        memory_bytes=tuple(memory_of(fleet, placement.choices)),
        baselines=_baselines(work, fleet),
    )
