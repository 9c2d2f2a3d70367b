"""Plan the deployment of a model: `apollo_compile.deploy`.

    deploy(model, batch, mesh=..., loss_fn=...) -> DeploymentPlan

    trace_step(model, batch, loss_fn, names) -> CallTrace       which modules read whose outputs
    pieces_of(trace, cluster, subgroups, ...) -> pieces         every call, in every way that has its numbers
    measure(pieces, group, device) -> times                     forward and backward
    work_of(trace, pieces, times, cluster, ...) -> StepWork     what the planner gets

Every module is timed alone, with the samples that a device of each size of group would have, on all ranks at the same
time; the slowest rank counts, of every repetition where ranks wait for each other. The first rank plans for all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from apollo_compile.cost_model.collectives import Link
from apollo_compile.distributed.deploy.arriving import Arriving, arrived
from apollo_compile.distributed.deploy.divided import DividedModule, Subgroups, group_of, map_samples, part_of, units_of
from apollo_compile.distributed.deploy.pairs import find_pairs, random_states
from apollo_compile.distributed.deploy.plan import DeploymentPlan
from apollo_compile.distributed.link import measure_link, tell
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import (
    REST,
    Deployment,
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
from apollo_compile.torch_bridge.trees import are_equal, leaves_of, map_tensors

_logger = logging.getLogger(__name__)

LEAST_SHARE = 0.02
"""Share of the time of all modules below which a child of the model stays with the code between them."""

WARM_UPS, LEAST, MOST, BUDGET_S = 2, 5, 25, 0.2
"""Calls of a module before it is timed; least and most timed calls, of which the median counts; their time, about."""


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
        DeploymentError: modules are not called or share parameters, or there are no samples, loss with a graph or link.
        InfeasiblePlanError: no plan keeps the memory; the message has the least that is enough.
    """
    group = None if isinstance(mesh, int) else group_of(mesh)
    size = mesh if isinstance(mesh, int) else dist.get_world_size(group)
    if isinstance(mesh, int) and (mesh < 1 or link is None):
        raise DeploymentError(f"a simulation needs a device or more, got {mesh}, and a link=Link(...), got {link}")
    if not callable(loss_fn):
        raise DeploymentError(f"loss_fn is {loss_fn!r:.40}: expected a function from the model's output to the loss")
    with _unchanged(model):
        modules, names = _names_of(model, modules)
        trace = trace_step(model, batch, loss_fn, names)
        called, device = {record.call.module for record in trace.records if record.outputs}, trace.device
        if idle := [name for name in modules or () if name not in called]:
            raise DeploymentError(f"module {idle[0]!r} returned no tensors in the step: name modules that do")
        if link is None:
            link = measure_link(lambda each: dist.all_reduce(each, group=group), 2 * (size - 1), group, device)
        is_gpu = device.type == "cuda"
        units = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else torch.get_num_threads()
        cluster = EqualDevices(devices=size, units=units, memory_bytes=memory, link=link, is_measured=group is not None)
        pieces = pieces_of(trace, cluster, None if group is None else Subgroups(group, device), optimizer_states)
        times = measure(pieces, group, device)

        def make_plan() -> Deployment:
            work = work_of(trace, pieces, times, cluster, optimizer_states, modules)
            return plan_deployment(work, cluster, seconds=seconds)

        return DeploymentPlan(make_plan() if group is None else tell(make_plan, group))


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


def _names_of(model: nn.Module, modules: Sequence[str] | None) -> tuple[list[str] | None, list[str]]:
    """Return the first names of given modules, and all that may be placed: these, or else children, and others."""
    first = {module: name for name, module in model.named_modules()}
    known = {name: first[module] for name, module in model.named_modules(remove_duplicate=False)}
    lists = {name for module, name in first.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)}
    children = [name for name in first.values() if name and name not in lists and lists.issuperset(_parents_of(name))]
    if unknown := [name for name in modules or () if not name or name not in known]:
        some = ", ".join(name for name in known if name and name.count(".") < 2)
        raise DeploymentError(f"the model has no module {unknown[0]!r}; it has {some or 'none'}")
    given = children if modules is None else list(dict.fromkeys(known[name] for name in modules))
    if nested := [(name, parent) for name in given for parent in _parents_of(name) if parent in given]:
        raise DeploymentError(f"module {nested[0][0]!r} is inside of {nested[0][1]!r}: place one of them")
    above = {parent for name in given for parent in (name, *_parents_of(name))}
    names = [*given, *(name for name in children if name not in above and set(given).isdisjoint(_parents_of(name)))]
    owners: dict[nn.Parameter, dict[str, None]] = defaultdict(dict)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter][next((known[name] for name in _parents_of(path) if known[name] in names), REST)] = None
    shared = [list(each) for each in owners.values() if len(each) > 1]
    if wrong := [each for each in shared if not set(given).isdisjoint(each)]:
        raise DeploymentError(f"{wrong[0][1]!r} and {wrong[0][0]!r} share a parameter: leave both out of modules")
    return None if modules is None else given, [name for name in names if not any(name in each for each in shared)]


def _parents_of(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter, but for the model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@dataclass(eq=False, slots=True)
class _Record:
    """A call of a module in the traced step, with detached tensors; `call` has no inputs and times yet."""

    call: ModuleCall
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[torch.Tensor]
    reads: frozenset[str]
    """Calls whose outputs it gets."""
    after: frozenset[str]
    """These, calls whose outputs code between the modules had read, and all calls before them."""


@dataclass(slots=True)
class CallTrace:
    """The calls of modules in a step."""

    model: nn.Module
    run: Callable[[], Any]
    """Runs the forward and the loss."""
    samples: int
    device: torch.device
    records: list[_Record] = field(default_factory=list)
    pairs: dict[str, tuple[LinearPair, ...]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """Calls whose outputs have been read so far."""


def trace_step(model: nn.Module, batch: Any, loss_fn: Callable[[Any], torch.Tensor], names: Sequence[str]) -> CallTrace:
    """Run the forward and the loss once, and record the calls of modules."""
    tensors = [each for each in leaves_of(batch, torch.Tensor) if each.dim() and len(each)]
    if not tensors:
        raise DeploymentError("the batch has no tensor with samples")
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    args = args if isinstance(args, tuple | list) else (args,)
    trace = CallTrace(model, lambda: loss_fn(model(*args, **kwargs)), tensors[0].shape[0], tensors[0].device)
    with contextlib.ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(vars(module).update, {own: value for own, value in vars(module).items() if own == "forward"})
            stack.callback(vars(module).pop, "forward")
            module.forward = functools.partial(_record, trace, name, module, module.forward)
        if not isinstance(loss := trace.run(), torch.Tensor) or loss.numel() != 1:
            raise DeploymentError(f"the loss is {getattr(loss, 'shape', loss)!r:.60}: expected a tensor of one element")
        if any(each.requires_grad for each in model.parameters()) and not loss.requires_grad:
            raise DeploymentError("the loss has no graph: expected a loss of the model's output that is not detached")
    return trace


def _record(trace: CallTrace, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, and add the call to the trace."""
    count = sum(record.call.module == name for record in trace.records)
    reads = frozenset(each.source for each in leaves_of((args, kwargs), Arriving))
    known = reads | trace.read
    after = known.union(*(record.after for record in trace.records if record.call.name in known))
    args, kwargs = arrived((args, kwargs), waits=False)
    kept: dict[int, int] = {}  # bytes by storage

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(*args, **kwargs)
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    outputs = [each.detach() for each in leaves_of(output, torch.Tensor)]
    call = ModuleCall(
        name=f"{name}#{count}" if count else name,
        module=name,
        inputs=(),
        sent_bytes=sum(each.nbytes for each in outputs),
        returned_bytes=sum(each.nbytes for each in leaves_of((args, kwargs), torch.Tensor) if each.requires_grad),
        activation_bytes=sum(kept.values()),
        forward_ns=(),
        backward_ns=(),
    )
    arguments = _first_samples((args, kwargs), trace.samples, 1)
    trace.records.append(_Record(call, module, arguments, outputs, reads, after))
    note = functools.partial(trace.read.add, call.name)
    return map_tensors(lambda each: Arriving(each, [note], each, call.name), output)


class TimedPiece(NamedTuple):
    """Work of a module, or of this rank's part of it, to time: a forward, and the backward of what it returns."""

    module: nn.Module
    run: Callable[..., Any]


PieceKey: TypeAlias = tuple[str | nn.Module, Division]
"""A call by its name, the whole step as `REST`, or a module for its update; and how devices divide it."""

Pieces: TypeAlias = dict[PieceKey, TimedPiece]
Times: TypeAlias = Mapping[PieceKey, tuple[int, int]]
"""Nanoseconds of the forward and backward of pieces."""


def pieces_of(trace: CallTrace, cluster: EqualDevices, subgroups: Subgroups | None, optimizer_states: int) -> Pieces:
    """Return what is timed: the step, calls in all divisions in which they compute what they do alone, and updates.

    All ranks of the subgroups call it; without them there are plain replicas only. It adds pairs to the trace.
    """
    sizes, units = group_sizes(cluster.devices), cluster.units
    alone = Division(devices=1, units=units)
    pieces: Pieces = {(REST, alone): TimedPiece(trace.model, trace.run)}
    degrees = [size for size in sizes if subgroups is not None and size > 1 and not size & (size - 1)]
    shares = [units >> power for power in range(3 if trace.device.type == "cpu" else 1) if units >> power]

    own_whole = {record.call.module for record in trace.records if not _is_divisible(record, trace)}
    whole = own_whole if subgroups is None else tell(lambda: own_whole, subgroups.everyone)
    for name, module in {record.call.module: record.module for record in trace.records}.items():
        records = [record for record in trace.records if record.module is module]
        pairs = trace.pairs[name] = find_pairs(module, *records[0].arguments, max(degrees, default=1))
        most = max((pair.degree for pair in pairs), default=1)
        ways = [Division(devices=size, units=share) for share in shares for size in sizes]
        ways += [Division(devices=n, units=units, tensor=t) for n in sizes for t in degrees if t <= most and n % t == 0]
        ways += [Division(devices=n, units=units, is_sharded=True) for n in sizes if degrees and n > 1]
        for way in (each for each in ways if each.replicas == 1 or name not in whole):
            own = None if trace.samples % way.replicas else _part_of(records, way, trace, subgroups)
            if own is not None:
                pieces[own.module, alone] = TimedPiece(own.module, _update_of(own.module, optimizer_states))
                for record in records:
                    args, kwargs = _first_samples(record.arguments, trace.samples, way.replicas)
                    pieces[record.call.name, way] = TimedPiece(own.module, functools.partial(own.run, *args, **kwargs))
    return pieces


def _is_divisible(record: _Record, trace: CallTrace) -> bool:
    """Return whether a sample's results depend on no other samples, nor on their number where nothing is random.

    Tries it: the first half alone, beside other later samples, and the last half beside other earlier ones.
    """
    inputs, samples = leaves_of(record.arguments, torch.Tensor), trace.samples
    norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d  # also while they do not train
    is_by_sample = all(each.shape[:1] == (samples,) for each in (*inputs[:1], *record.outputs))
    if samples < 2 or not (inputs and is_by_sample) or any(isinstance(each, norms) for each in record.module.modules()):
        return False
    half, found = samples // 2, list[Any]()

    def later(each: torch.Tensor) -> torch.Tensor:
        return torch.cat([each[:half], each[half:] + each.is_floating_point()])

    def earlier(each: torch.Tensor) -> torch.Tensor:
        return torch.cat([each[:half] + each.is_floating_point(), each[half:]])

    with contextlib.suppress(Exception):  # of any code
        for change in (lambda each: each[:half].clone(), torch.clone, later, earlier):
            args, kwargs = map_samples(change, record.arguments, samples)
            torch.manual_seed(0)
            before = random_states(trace.device)
            with torch.no_grad():
                found.append(record.module(*args, **kwargs))
        is_random = not all(map(torch.equal, before, random_states(trace.device)))
        firsts, lasts = (
            [map_tensors(part, each) for each in found] for part in (lambda x: x[:half], lambda x: x[half:])
        )
        if all(are_equal(each, firsts[1]) for each in firsts[is_random:3]) and are_equal(lasts[3], lasts[1]):
            return True
    _logger.warning(
        "%r gets no replicas: results of samples depend on others, or cannot be compared", record.call.module
    )
    return False


def _first_samples(tree: Any, samples: int, replicas: int) -> Any:
    """Return the arguments of the first of some replicas, detached."""
    part = map_samples(lambda each: part_of(each, 0, replicas), tree, samples)
    return map_tensors(lambda each: each.detach().requires_grad_(each.requires_grad), part)


def _part_of(records: list[_Record], way: Division, trace: CallTrace, subgroups: Subgroups | None) -> TimedPiece | None:
    """Return a module, or this rank's part of a copy, if all ranks can divide it so; records are its calls."""
    name, module, samples = records[0].call.module, records[0].module, trace.samples
    if subgroups is None or not way.kind:
        return TimedPiece(module, module)
    firsts = range(0, subgroups.size - way.devices + 1, way.devices)  # a rank after them has no group
    groups = [DeviceGroup(module=name, first=first, **way.key) for first in firsts]
    for each in groups:
        subgroups.of(each)
    found, problem = TimedPiece(nn.Identity(), lambda *_, **__: ()), ""
    try:
        for group in (each for each in groups if subgroups.rank in each.range):
            divided = DividedModule(copy.deepcopy(module), group, trace.pairs[name], subgroups)
            found = TimedPiece(divided.module, functools.partial(divided.compute, {}))
            for record in records:
                args, kwargs = _first_samples(record.arguments, samples, way.replicas)
                with torch.no_grad():
                    output = found.run(*args, **kwargs)
                    if way.tensor > 1 and not are_equal(output, module(*args, **kwargs)):
                        problem = "its parts do not sum to its output"
    except Exception as error:  # of any code; all ranks do without this division
        problem = f"{type(error).__name__}: {error}"
    problems = [""] * subgroups.size
    dist.all_gather_object(problems, problem, group=subgroups.everyone)
    if any(problems):
        _logger.info("module %r cannot have %s: %s", name, groups[0], max(problems))
    return None if any(problems) else found


def _update_of(module: nn.Module, optimizer_states: int) -> Callable[[], Any]:
    """Return an optimizer's step: of AdamW, or of SGD if it keeps at most one tensor per parameter."""
    copies = [each.detach().clone().requires_grad_() for each in module.parameters() if each.requires_grad]
    for each in copies:
        each.grad = torch.zeros_like(each)
    if optimizer_states > 1 and copies:
        return torch.optim.AdamW(copies).step
    return torch.optim.SGD(copies, momentum=0.9 * optimizer_states).step if copies else lambda: None


def measure(pieces: Pieces, group: dist.ProcessGroup | None, device: torch.device) -> Times:
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
        for (name, way), piece in pieces.items():
            piece.module.zero_grad()
            if device.type == "cpu":
                torch.set_num_threads(way.units)
            if group is not None:
                dist.barrier(group=group)
            watch.begin()
            outputs = [each for each in leaves_of(piece.run(), torch.Tensor) if each.requires_grad]
            watch.end((name, way, "forward"))
            grads = [torch.ones_like(each) for each in outputs]
            watch.begin()
            if outputs:
                torch.autograd.backward(outputs, grads)
            watch.end((name, way, "backward"))
    spans = defaultdict(list)
    for key, ns in watch.read():
        spans[key].append(ns)

    def median(name: str | nn.Module, way: Division, kind: str) -> int:
        own = spans[name, way, kind]
        return round(slowest([statistics.median(own)] if way.devices == 1 else own).median().item())

    return {key: (median(*key, "forward"), median(*key, "backward")) for key in pieces}


def work_of(
    trace: CallTrace, pieces: Pieces, times: Times, cluster: EqualDevices, states: int, named: Collection[str] | None
) -> StepWork:
    """Return the work of the planner, with the code between the modules as the last call.

    Without names, modules with less than a share of the time of all are part of that code, or follow others. An
    optimizer has some states for each parameter.
    """
    alone = Division(devices=1, units=cluster.units)
    spent: Counter[str] = Counter()
    for record in trace.records:
        spent[record.call.module] += sum(times[record.call.name, alone])
    large = {name for name, ns in spent.items() if ns >= LEAST_SHARE * spent.total()} if named is None else set(named)
    kept = calls_to_place(trace, large)
    if not kept:
        raise DeploymentError("no module was called with tensors in the step: expected some; name them with modules")
    calls = []
    for record, inputs in kept:
        forward_ns, backward_ns = zip(*(ns for (name, _), ns in times.items() if name == record.call.name), strict=True)
        calls.append(replace(record.call, inputs=inputs, forward_ns=forward_ns, backward_ns=backward_ns))
    names = tuple(call.name for call in calls)
    rest = [(max(0, times[REST, alone][kind] - sum(times[name, alone][kind] for name in names)),) for kind in (0, 1)]
    calls.append(ModuleCall(name=REST, module=REST, inputs=names, forward_ns=rest[0], backward_ns=rest[1]))
    placed = {record.call.module: record.module for record, _ in kept}

    def mode(name: str, way: Division, own: Iterable[nn.Parameter], update_ns: int = 0) -> GroupMode:
        """Return a mode with the parts of parameters that this rank has."""
        parts = [(each.to_local() if isinstance(each, DTensor) else each) for each in own]
        trained = sum(each.nbytes for each in parts if each.requires_grad)
        state_bytes = sum(each.nbytes for each in parts) + (1 + states) * trained
        if way.is_sharded:  # parameters and gradients are whole for two layers at once, and outside of layers
            layers = [sum(each.nbytes for each in layer.parameters()) for layer in units_of(placed[name])]
            state_bytes += 2 * (sum(each.nbytes for each in placed[name].parameters()) - sum(sorted(layers)[:-2]))
        summed = 0 if name == REST or way.is_sharded else trained  # gradients of the rest are equal on all ranks
        return GroupMode(**way.key, state_bytes=state_bytes, gradient_bytes=summed, update_ns=update_ns)

    modules = []
    for name in placed:  # which is that of its first call
        own = [(way, piece.module) for (call_name, way), piece in pieces.items() if call_name == name]
        modes = [mode(name, way, module.parameters(), times[module, alone][0]) for way, module in own]
        modules.append(ModuleState(name=name, modes=tuple(modes), pairs=trace.pairs[name]))
    left = set(trace.model.parameters()).difference(*(module.parameters() for module in placed.values()))
    everywhere = mode(REST, Division(devices=cluster.devices, units=cluster.units), left)
    return StepWork(modules=(*modules, ModuleState(name=REST, modes=(everywhere,))), calls=tuple(calls))


def calls_to_place(trace: CallTrace, large: set[str]) -> list[tuple[_Record, tuple[str, ...]]]:
    """Return the calls of modules to place, each with the earlier ones that it waits for.

    These are the large modules, and small ones that read what a large one made while another large one, which is called
    later, does not read what they make: as code between the modules they would make it wait.
    """
    records = [record for record in trace.records if record.outputs]
    big = {record.call.name for record in records if record.call.module in large}
    follow = {
        record.call.module
        for number, record in enumerate(records)
        if record.reads and not big.isdisjoint(record.after)
        if any(other.call.name in big and record.call.name not in other.after for other in records[number + 1 :])
    }
    found: list[tuple[_Record, tuple[str, ...]]] = []
    read: frozenset[str] = frozenset()
    for record in records:
        needs = record.after | read
        if record.call.module in large | follow:
            found.append((record, tuple(other.call.name for other, _ in found if other.call.name in needs)))
        else:
            read = needs
    return found
