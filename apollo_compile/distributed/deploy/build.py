"""Plan the deployment of a model: `apollo_compile.deploy`.

    deploy(model, batch, mesh=..., loss_fn=...) -> DeploymentPlan

    trace_step(model, batch, loss_fn, names) -> CallTrace   which modules read whose outputs
    copies_of(trace, cluster, subgroups) -> copies          of every module, divided in every way that has its numbers
    measure(pieces, group, device) -> times                 of every module, forward and backward
    work_of(trace, times, copies, cluster, ...) -> StepWork what the planner gets

Every module is timed alone, with the samples that a device of each size of group would have, on all ranks at the same
time; the slowest rank counts. Where there is a mesh, copies whose layers or state the ranks divide are timed too, with
their collectives. The code between the modules runs on every rank with the whole batch. The first rank plans for all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from apollo_compile.cost_model.collectives import Link
from apollo_compile.distributed.deploy.arriving import Arriving, arriving
from apollo_compile.distributed.deploy.divided import DividedModule, Subgroups, group_of, units_of
from apollo_compile.distributed.deploy.pairs import are_equal, find_pairs
from apollo_compile.distributed.deploy.plan import DeploymentPlan
from apollo_compile.distributed.link import measure_link
from apollo_compile.errors import ApolloError, DeploymentError
from apollo_compile.passes.deploy import (
    REST,
    DeviceGroup,
    Division,
    EqualDevices,
    GroupMode,
    LinearPair,
    ModuleCall,
    ModuleState,
    StepWork,
    group_sizes,
    plan_deployment,
)
from apollo_compile.torch_bridge.stopwatch import Stopwatch
from apollo_compile.torch_bridge.trees import leaves_of, map_tensors

_logger = logging.getLogger(__name__)

LEAST_SHARE = 0.02
"""Share of the time of all modules below which a child of the model stays with the code between them."""

WARM_UPS, LEAST, MOST, BUDGET_S = 2, 5, 25, 0.2
"""Calls of a module before it is timed; least and most timed calls, of which the median counts; their time, about."""

WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose result for a sample depends on the others, so that samples are not divided."""


def deploy(
    model: nn.Module,
    batch: Any,
    *,
    mesh: DeviceMesh | int | None = None,
    loss_fn: Callable[[Any], torch.Tensor],
    modules: Sequence[str] | None = None,
    memory: int | None = None,
    optimizer_states: int = 2,
    link: Link | None = None,
    seconds: float = 10.0,
) -> DeploymentPlan:
    """Return a plan of which devices compute which modules of a model; all ranks call it alike.

    Arguments:
        model: the model, with the same parameters on all ranks, on the device of this rank.
        batch: the whole batch of a step: a mapping by name, a tuple by position, or one tensor.
        mesh: the devices: a mesh with one dimension, None for all ranks of the job, or a number of devices to simulate
            from times on this one.
        loss_fn: from the model's output to the loss.
        modules: names of the modules to place; None is the children of the model, and of its lists and dicts of
            modules, with more than a little work. Others stay with the code between these, which every rank runs,
            unless that would make a module wait.
        memory: bytes of each device for parameters, gradients, optimizer and activations; None is no limit.
        optimizer_states: tensors that the optimizer keeps per parameter, in its type.
        link: link between devices; None measures it on the mesh.
        seconds: time of the search.

    Raises:
        DeploymentError: there are no modules to place, or they share parameters, or there is no link for a simulation.
        InfeasiblePlanError: no plan keeps the memory; the message has the least that is enough.
    """
    group = None if isinstance(mesh, int) else group_of(mesh)
    size = mesh if isinstance(mesh, int) else dist.get_world_size(group)
    if isinstance(mesh, int) and link is None:
        raise DeploymentError("a simulation on a number of devices needs a link: pass link=Link(latency, bandwidth)")
    with _unchanged(model):
        names = _names_of(model, modules)
        trace = trace_step(model, batch, loss_fn, [*names, *_others(model, names)])
        device = trace.device
        if link is None:
            link = measure_link(lambda each: dist.all_reduce(each, group=group), 2 * (size - 1), group, device)
        units = torch.get_num_threads()
        if device.type == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
        cluster = EqualDevices(devices=size, units=units, memory_bytes=memory, link=link, is_measured=group is not None)
        copies = copies_of(trace, cluster, None if group is None else Subgroups(group, device))
        times = measure(pieces_of(trace, copies, optimizer_states), group, device)
        plan: list[Any] = [None]
        if group is None or dist.get_rank(group) == 0:
            try:
                work = work_of(trace, times, copies, cluster, optimizer_states, modules)
                plan = [plan_deployment(work, cluster, seconds=seconds)]
            except ApolloError as error:
                plan = [error]
    if group is not None:
        dist.broadcast_object_list(plan, group=group, group_src=0)
    if isinstance(plan[0], Exception):
        raise plan[0]
    return DeploymentPlan(plan[0])


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, random numbers and the number of threads in the end."""
    grads, threads = [each.grad for each in model.parameters()], torch.get_num_threads()
    buffers = [each.clone() for each in model.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.detach().copy_(before)


def _names_of(model: nn.Module, modules: Sequence[str] | None) -> list[str]:
    known = dict(model.named_modules())
    names = list(dict(_children_of(model))) if modules is None else list(modules)
    if unknown := [name for name in names if not name or name not in known]:
        children = ", ".join(name for name in known if name and name.count(".") < 2)
        raise DeploymentError(f"the model has no module {unknown[0]!r}; it has {children or 'none'}")
    if nested := [(one, other) for one in names for other in names if other.startswith(f"{one}.")]:
        raise DeploymentError(f"module {nested[0][1]!r} is inside of {nested[0][0]!r}: place one of them")
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((each for each in names if name.startswith(f"{each}.")), REST)
        if owners.setdefault(parameter, owner) != owner:
            raise DeploymentError(
                f"{owner!r} and {owners[parameter]!r} share a parameter, which only one of them can have: leave them "
                "out of modules"
            )
    return names


def _children_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the model's own code may call, by name: its children, and those of lists and dicts."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _others(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the other children of the model that may have devices of their own."""
    owners = Counter(id(each) for own in model.modules() for each in own.parameters(recurse=False))
    return [
        name
        for name, child in _children_of(model)
        if not any(each == name or each.startswith(f"{name}.") for each in names)
        and all(owners[id(each)] == 1 for each in child.parameters())
    ]


# --------------------------------------------------------------------------------------------------------------- trace


@dataclass(eq=False, slots=True)
class _Record:
    """A call of a module in the traced step."""

    name: str
    module_name: str
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Detached positional and keyword arguments."""
    read: frozenset[str]
    """Calls whose outputs code between the modules had read."""
    inputs: frozenset[str]
    """Calls whose outputs it gets."""
    outputs: list[torch.Tensor]
    """Detached tensors of its output."""
    saved_bytes: int
    """Bytes that its backward keeps."""


@dataclass(slots=True)
class CallTrace:
    """The calls of modules in a step."""

    model: nn.Module
    run: Callable[[], Any]
    """Runs the forward and the loss."""
    samples: int
    device: torch.device
    calls: list[_Record] = field(default_factory=list)
    pairs: dict[str, tuple[LinearPair, ...]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """Calls whose outputs have been read so far."""


def trace_step(model: nn.Module, batch: Any, loss_fn: Callable[[Any], torch.Tensor], names: Sequence[str]) -> CallTrace:
    """Run the forward and the loss once, and record the calls of modules."""
    tensors = [each for each in leaves_of(batch, torch.Tensor) if each.dim()]
    if not tensors:
        raise DeploymentError("the batch has no tensor with samples")
    samples, device = tensors[0].shape[0], tensors[0].device
    trace = CallTrace(model, lambda: loss_fn(_call(model, batch)), samples, device)
    modules = {name: model.get_submodule(name) for name in names}
    own = {name: {"forward": module.forward} if "forward" in vars(module) else {} for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = functools.partial(_record, trace, name, module, module.forward)
    try:
        trace.run()
    finally:
        for name, module in modules.items():
            del module.forward
            vars(module).update(own[name])
    return trace


def _record(
    trace: CallTrace, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward, and add the call to the trace."""
    count = sum(call.module_name == name for call in trace.calls)
    inputs = frozenset(each.source for each in leaves_of((args, kwargs), Arriving))
    read = frozenset(trace.read)
    args, kwargs = map_tensors(lambda each: each.plain if isinstance(each, Arriving) else each, (args, kwargs))
    kept: dict[int, int] = {}
    """Bytes by storage."""
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(*args, **kwargs)
    record = _Record(
        name=f"{name}#{count}" if count else name,
        module_name=name,
        module=module,
        arguments=map_tensors(lambda each: _leaf_like(each, each), (args, kwargs)),
        read=read,
        inputs=inputs,
        outputs=[each.detach() for each in leaves_of(output, torch.Tensor)],
        saved_bytes=sum(kept.values()),
    )
    trace.calls.append(record)
    note = functools.partial(trace.read.add, record.name)
    return map_tensors(lambda each: arriving(each, [note], each, record.name), output)


def _leaf_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(like.requires_grad)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


# --------------------------------------------------------------------------------------------------------------- times


class ModuleCopy(NamedTuple):
    """A module whose layers or state are divided, or as it is, and how to call it."""

    module: nn.Module
    run: Callable[..., Any]


Copies = Mapping[str, Mapping[Division, ModuleCopy]]
"""Copies of every module, by its name and by division."""


def copies_of(trace: CallTrace, cluster: EqualDevices, subgroups: Subgroups | None) -> Copies:
    """Return a copy for each division in which a module computes what it does alone, and add pairs to the trace.

    All ranks of the subgroups call it; without them there are plain replicas only.
    """
    found: dict[str, dict[Division, ModuleCopy]] = {}
    sizes, units = group_sizes(cluster.devices), cluster.units
    degrees = [size for size in sizes if subgroups is not None and size > 1 and not size & (size - 1)]
    for name, module in {call.module_name: call.module for call in trace.calls}.items():
        calls = [call for call in trace.calls if call.module_name == name]
        trace.pairs[name] = find_pairs(module, *calls[0].arguments, max(degrees, default=1))
        most = max((pair.degree for pair in trace.pairs[name]), default=1)
        shares = [units >> power for power in range(3 if trace.device.type == "cpu" else 1) if units >> power]
        ways = [Division(devices=size, units=share) for share in shares for size in sizes]
        ways += [Division(devices=n, units=units, tensor=t) for n in sizes for t in degrees if t <= most and n % t == 0]
        ways += [Division(devices=n, units=units, is_sharded=True) for n in sizes if degrees and n > 1]
        ways = [way for way in ways if all(_is_divisible(call, trace.samples, way) for call in calls)]
        found[name] = {way: ModuleCopy(module, module) for way in ways if not way.kind}
        for way in ways:
            if subgroups and way.kind and (copied := _divide(calls, way, trace, subgroups)):
                found[name][way] = copied
    return found


def _divide(calls: Sequence[_Record], way: Division, trace: CallTrace, subgroups: Subgroups) -> ModuleCopy | None:
    """Return this rank's part of a module for every group of devices; None, on all ranks, if it cannot run so."""
    name, module, problem = calls[0].module_name, calls[0].module, ""
    found = ModuleCopy(nn.Identity(), lambda *_, **__: ())  # of a rank without a group
    try:
        for first in range(0, subgroups.size - way.devices + 1, way.devices):
            group = DeviceGroup(module=name, first=first, **way.key)
            is_mine = subgroups.rank in group.range
            own = copy.deepcopy(module) if is_mine else module
            divided = DividedModule(own, group, trace.pairs[name], subgroups)
            if is_mine:
                divided.peers = None  # sums of gradients are predicted
                found = ModuleCopy(own, divided.compute)
        for call in calls:
            args, kwargs = _first_part(call.arguments, trace.samples, way)
            with torch.no_grad():
                output = found.run(*args, **kwargs)
                if way.tensor > 1 and output != () and not are_equal(output, module(*args, **kwargs)):
                    problem = "its parts do not sum to its output"
    except Exception as error:  # of any code; all ranks do without this division
        problem = f"{type(error).__name__}: {error}"
    problems = [""] * subgroups.size
    dist.all_gather_object(problems, problem, group=subgroups.everyone)
    if any(problems):
        _logger.info("module %r cannot have devices %s: %s", name, way, max(problems))
    return None if any(problems) else found


class TimedPiece(NamedTuple):
    """Work to time: a forward, and the backward of what it returns."""

    module: nn.Module
    work: Callable[[], Any]
    is_alone: bool
    """Whether a rank would run it alone; else the slowest rank of every repetition counts."""
    units: int
    """Threads on a CPU."""


Times = Mapping[Hashable, tuple[int, int]]
"""Nanoseconds of forward and backward: of `REST`, the whole step; of (call, way); of ("update", module)."""


def pieces_of(trace: CallTrace, copies: Copies, optimizer_states: int) -> dict[Hashable, TimedPiece]:
    """Return what is timed: the step, calls by name and division, updates."""
    units = torch.get_num_threads()
    pieces: dict[Hashable, TimedPiece] = {REST: TimedPiece(trace.model, trace.run, True, units)}
    for record in trace.calls:
        for way, copied in copies[record.module_name].items():
            args, kwargs = _first_part(record.arguments, trace.samples, way)
            work = functools.partial(copied.run, *args, **kwargs)
            pieces[record.name, way] = TimedPiece(copied.module, work, way.devices == 1, way.units)
    for module in dict.fromkeys(own.module for ways in copies.values() for own in ways.values()):
        pieces["update", module] = TimedPiece(module, _update_of(module, optimizer_states), True, units)
    return pieces


def _update_of(module: nn.Module, optimizer_states: int) -> Callable[[], Any]:
    """Return an optimizer's step: of AdamW, or of SGD if it keeps at most one tensor per parameter."""
    copies = [each.detach().clone().requires_grad_() for each in module.parameters() if each.requires_grad]
    if not copies:
        return lambda: None
    for each in copies:
        each.grad = torch.zeros_like(each)
    is_adam = optimizer_states > 1
    optimizer = torch.optim.AdamW(copies) if is_adam else torch.optim.SGD(copies, momentum=0.9 * optimizer_states)
    return optimizer.step


def _is_divisible(record: _Record, samples: int, division: Division) -> bool:
    """Return whether samples of a call can be on several replicas, with the same result."""
    inputs, replicas = leaves_of(record.arguments, torch.Tensor), division.devices // division.tensor
    return replicas == 1 or (
        samples % replicas == 0
        and not any(isinstance(each, WITH_STATISTICS) for each in record.module.modules())
        and all(each.shape[:1] == (samples,) for each in (*inputs[:1], *record.outputs))
        and bool(inputs)
    )


def _first_part(tree: Any, samples: int, division: Division) -> Any:
    part = samples * division.tensor // division.devices
    return map_tensors(lambda each: _leaf_like(each[:part], each) if each.shape[:1] == (samples,) else each, tree)


def measure(pieces: Mapping[Hashable, TimedPiece], group: dist.ProcessGroup | None, device: torch.device) -> Times:
    """Return the median times of pieces, on all ranks of a group at once; they take turns, so that noise is fair."""
    watch = Stopwatch(device)

    def slowest(values: Sequence[float]) -> torch.Tensor:
        found = torch.tensor(values, dtype=torch.float64, device=device)
        if group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return found

    for turn in range(WARM_UPS + MOST):
        if turn == WARM_UPS:
            watch.clear()
            begin = time.monotonic()
        elif turn >= WARM_UPS + LEAST and slowest([time.monotonic() - begin]).item() > BUDGET_S * len(pieces):
            break
        for key, piece in pieces.items():
            piece.module.zero_grad()
            if device.type == "cpu":
                torch.set_num_threads(piece.units)
            if group is not None:
                dist.barrier(group=group)
            watch.begin()
            outputs = [each for each in leaves_of(piece.work(), torch.Tensor) if each.requires_grad]
            watch.end((key, "forward"))
            grads = [torch.ones_like(each) for each in outputs]
            watch.begin()
            if outputs:
                torch.autograd.backward(outputs, grads)
            watch.end((key, "backward"))
    spans = defaultdict(list)
    for found, ns in watch.read():
        spans[found].append(ns)

    def median(key: Hashable, kind: str) -> int:
        own = spans[key, kind]
        return round(slowest([statistics.median(own)] if pieces[key].is_alone else own).median().item())

    return {key: (median(key, "forward"), median(key, "backward")) for key in pieces}


# ---------------------------------------------------------------------------------------------------------------- work


def work_of(
    trace: CallTrace,
    times: Times,
    copies: Copies,
    cluster: EqualDevices,
    optimizer_states: int,
    named: Collection[str] | None,
) -> StepWork:
    """Return the work of the planner, with the code between the modules as the last call.

    Without names, modules with less than a share of the time of all are part of that code, or follow others.
    """
    by_module: Counter[str] = Counter()
    alone = Division(devices=1, units=cluster.units)
    for call in trace.calls:
        by_module[call.module_name] += sum(times[call.name, alone])
    least = LEAST_SHARE * by_module.total()
    large = {name for name, ns in by_module.items() if ns >= least} if named is None else set(named)
    kept = calls_to_place(trace, large)
    if not kept:
        raise DeploymentError("no module was called with tensors in the step: expected some; name them with modules")
    names = [call.name for call, _ in kept]
    rest = [max(0, times[REST][kind] - sum(times[name, alone][kind] for name in names)) for kind in (0, 1)]
    last = ModuleCall(name=REST, module=REST, inputs=tuple(names), forward_ns=(rest[0],), backward_ns=(rest[1],))
    placed = {call.module_name: call.module for call, _ in kept}
    calls = [
        ModuleCall(
            name=call.name,
            module=call.module_name,
            inputs=inputs,
            sent_bytes=sum(each.nbytes for each in call.outputs),
            returned_bytes=sum(each.nbytes for each in leaves_of(call.arguments, torch.Tensor) if each.requires_grad),
            activation_bytes=call.saved_bytes,
            forward_ns=tuple(times[call.name, way][0] for way in copies[call.module_name]),
            backward_ns=tuple(times[call.name, way][1] for way in copies[call.module_name]),
        )
        for call, inputs in kept
    ]

    def mode(name: str, way: Division, own: Iterable[nn.Parameter], update_ns: int = 0) -> GroupMode:
        """Return a mode with the parts of parameters that this rank has."""
        parts = [(each.to_local() if isinstance(each, DTensor) else each) for each in own]
        trained = sum(each.nbytes for each in parts if each.requires_grad)
        state_bytes = sum(each.nbytes for each in parts) + (1 + optimizer_states) * trained
        if way.is_sharded:  # parameters and gradients are whole for two layers at once, and outside of layers
            layers = [sum(each.nbytes for each in layer.parameters()) for layer in units_of(placed[name])]
            state_bytes += 2 * (sum(each.nbytes for each in placed[name].parameters()) - sum(sorted(layers)[:-2]))
        summed = 0 if name == REST or way.is_sharded else trained  # gradients of the rest are equal on all ranks
        return GroupMode(**way.key, state_bytes=state_bytes, gradient_bytes=summed, update_ns=update_ns)

    def state(name: str) -> ModuleState:
        ways = copies[name].items()
        modes = [mode(name, way, own.module.parameters(), times["update", own.module][0]) for way, own in ways]
        return ModuleState(name=name, modes=tuple(modes), pairs=trace.pairs[name])

    owned = {id(each) for module in placed.values() for each in module.parameters()}
    left = [each for each in trace.model.parameters() if id(each) not in owned]
    everywhere = mode(REST, Division(devices=cluster.devices, units=cluster.units), left)
    rest_state = ModuleState(name=REST, modes=(everywhere,))
    return StepWork(modules=(*map(state, placed), rest_state), calls=(*calls, last))


def calls_to_place(trace: CallTrace, large: set[str]) -> list[tuple[_Record, tuple[str, ...]]]:
    """Return the calls of modules to place, each with the earlier ones that it waits for.

    These are the large modules, and small ones that read what a large one made while another large one, which is called
    later, does not read what they make: as code between the modules they would make it wait.
    """
    calls = [call for call in trace.calls if call.outputs]
    is_large = {call.name: call.module_name in large for call in calls}
    above: dict[str, frozenset[str]] = {}
    for call in calls:
        direct = call.inputs | call.read
        above[call.name] = direct.union(*(above[name] for name in direct if name in above))
    follow = {
        call.module_name
        for number, call in enumerate(calls)
        if call.inputs and any(is_large.get(name) for name in above[call.name])
        if any(is_large[other.name] and call.name not in above[other.name] for other in calls[number + 1 :])
    }
    found: list[tuple[_Record, tuple[str, ...]]] = []
    read: set[str] = set()
    for call in calls:
        needs = above[call.name] | read
        if call.module_name in large | follow:
            found.append((call, tuple(other.name for other, _ in found if other.name in needs)))
        else:
            read |= needs
    return found
