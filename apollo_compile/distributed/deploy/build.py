"""Plan the deployment of a model: `apollo_compile.deploy`.

    deploy(model, batch, mesh=..., loss_fn=...) -> DeploymentPlan

One forward and backward shows which modules read whose outputs. Then every module is timed alone, forward and backward,
with the samples that a device of each size of group would have, on all ranks at the same time; the slowest rank counts.
The code between the modules runs on every rank with the whole batch. The first rank plans, and all ranks get its plan.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apollo_compile.cost_model.collectives import Link, send_seconds
from apollo_compile.distributed.deploy.plan import DeploymentPlan
from apollo_compile.errors import ApolloError, DeploymentError
from apollo_compile.json_form import from_json, to_json
from apollo_compile.passes.deploy import Call, CallTime, Cluster, Deployment, ModuleState, StepWork, plan_deployment
from apollo_compile.torch_bridge.stopwatch import Stopwatch
from apollo_compile.torch_bridge.trees import leaves_of, map_tensors
from apollo_compile.units import seconds_to_ns

REST = "code between the modules"
"""Name of what runs on every rank: the model's own code, small modules and the loss."""

LEAST_SHARE = 0.02
"""Share of the time of all modules below which a module stays with the code between them."""

WARM_UPS, LEAST, MOST, BUDGET_NS = 2, 5, 25, 200_000_000
"""Calls of a module before it is timed; least and most timed calls, of which the median counts; their time, about."""

WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose result for a sample depends on the others, so that samples are not divided."""

MESSAGES = (1 << 10, 1 << 22)
"""Bytes of the sums that measure the link."""


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
        modules: names of the modules to place; None is the children of the model. Modules with little work stay with
            the code between them, which every rank runs.
        memory: bytes of each device for parameters, gradients, optimizer and activations; None is no limit.
        optimizer_states: tensors that the optimizer keeps per parameter, in its type.
        link: link between devices; None measures it on the mesh.
        seconds: time of the search.

    Raises:
        DeploymentError: there are no modules to place, or they share parameters, or there is no link for a simulation.
        InfeasiblePlanError: no plan keeps the memory; the message has the least that is enough.
    """
    group = group_of(mesh)
    size = mesh if isinstance(mesh, int) else dist.get_world_size(group)
    if isinstance(mesh, int) and link is None:
        raise DeploymentError("a simulation on a number of devices needs a link: pass link=Link(latency, bandwidth)")
    names = _names_of(model, modules)
    with _unchanged(model):
        trace = _trace(model, batch, loss_fn, names)
        watch = _Watch(group, trace.device)
        times = watch.measure(_pieces_of(model, batch, loss_fn, trace, size, optimizer_states))
        plan: list[Any] = [None]
        if link is None:
            link = _measure_link(group, trace.device) if size > 1 else Link(0.0, 1.0)
        if group is None or dist.get_rank(group) == 0:
            cluster = Cluster(
                devices=size, units=watch.units, memory_bytes=memory, link=link, is_measured=not isinstance(mesh, int)
            )
            try:
                work = _to_work(model, trace, times, cluster, optimizer_states)
                plan = [to_json(plan_deployment(work, cluster, seconds=seconds))]
            except ApolloError as error:
                plan = [error]
    if group is not None:
        dist.broadcast_object_list(plan, group=group, group_src=0)
    if isinstance(plan[0], Exception):
        raise plan[0]
    return DeploymentPlan(from_json(Deployment, plan[0]))


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random numbers in the end."""
    grads = [(each, each.grad) for each in model.parameters()]
    buffers = [(each, each.clone()) for each in model.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def group_of(mesh: DeviceMesh | int | None) -> dist.ProcessGroup | None:
    """Return the group of all devices; None for a simulation."""
    if isinstance(mesh, int):
        return None
    if mesh is not None and mesh.ndim != 1:
        raise DeploymentError(f"the mesh has {mesh.ndim} dimensions: expected one")
    if mesh is None and not dist.is_initialized():
        raise DeploymentError(
            "there is no process group: call torch.distributed.init_process_group, as under torchrun, or pass "
            "mesh=<number of devices> to simulate"
        )
    return dist.group.WORLD if mesh is None else mesh.get_group()


def _names_of(model: nn.Module, modules: Sequence[str] | None) -> list[str]:
    known = dict(model.named_modules())
    names = [name for name, _ in model.named_children()] if modules is None else list(modules)
    if unknown := [name for name in names if not name or name not in known]:
        children = ", ".join(name for name in known if name and name.count(".") < 2)
        raise DeploymentError(f"the model has no module {unknown[0]!r}; it has {children or 'none'}")
    if nested := [(one, other) for one in names for other in names if other.startswith(f"{one}.")]:
        raise DeploymentError(f"module {nested[0][1]!r} is inside of {nested[0][0]!r}: place one of them")
    owners: dict[nn.Parameter, str] = {}
    chosen = set(names)
    for name, module in model.named_modules(remove_duplicate=False):
        owner = next((each for each in chosen if name == each or name.startswith(f"{each}.")), REST)
        for parameter in module.parameters(recurse=False):
            if owners.setdefault(parameter, owner) != owner:
                raise DeploymentError(
                    f"{owner!r} and {owners[parameter]!r} share a parameter, which only one of them can have: leave "
                    "them out of modules"
                )
    return names


# --------------------------------------------------------------------------------------------------------------- trace


class _Traced(torch.Tensor):
    """A tensor that knows which outputs of calls it comes from, and tells them when it is read."""

    sources: frozenset[tuple[str, int]]
    read: set[tuple[str, int]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and mark its results."""
        inputs = [each for each in leaves_of((args, kwargs or {})) if isinstance(each, _Traced)]
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        sources = frozenset().union(*(getattr(each, "sources", frozenset()) for each in inputs))
        for each in inputs:
            if hasattr(each, "read"):
                each.read.update(sources)
        for each in leaves_of(result):
            if isinstance(each, _Traced):
                each.sources = sources
                each.read = next((other.read for other in inputs if hasattr(other, "read")), set())
        return result


@dataclass(eq=False, slots=True)
class _Record:
    """A call of a module in the traced step."""

    name: str
    module_name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: list[torch.Tensor]
    """Detached tensors of its output."""


@dataclass(slots=True)
class _Trace:
    calls: list[_Record] = field(default_factory=list)
    read: set[tuple[str, int]] = field(default_factory=set)
    """Outputs that were used: call and index of the tensor."""
    samples: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def _plain(tree: Any) -> Any:
    return map_tensors(lambda each: each.as_subclass(torch.Tensor) if isinstance(each, _Traced) else each, tree)


def _trace(model: nn.Module, batch: Any, loss_fn: Callable[[Any], torch.Tensor], names: Sequence[str]) -> _Trace:
    """Run the forward and the loss once, and record the calls of modules."""
    trace = _Trace()
    tensors = [each for each in leaves_of(batch) if isinstance(each, torch.Tensor) and each.dim()]
    if not tensors:
        raise DeploymentError("the batch has no tensor with samples")
    trace.samples, trace.device = tensors[0].shape[0], tensors[0].device
    counts: Counter[str] = Counter()
    originals = []

    def wrap(name: str, module: nn.Module) -> None:
        original = module.forward
        originals.append((module, "forward" in module.__dict__, original))

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = f"{name}#{counts[name]}" if counts[name] else name
            counts[name] += 1
            sources: set[tuple[str, int]] = set()
            for each in leaves_of((args, kwargs)):
                if isinstance(each, _Traced):
                    sources |= each.sources
            trace.read.update(sources)
            plain_args, plain_kwargs = _plain(args), _plain(kwargs)
            output = original(*plain_args, **plain_kwargs)
            found = [each for each in leaves_of(output) if isinstance(each, torch.Tensor)]
            detached_args, detached_kwargs = map_tensors(_leaf_like, (plain_args, plain_kwargs))
            record = _Record(
                call,
                name,
                module,
                detached_args,
                detached_kwargs,
                tuple(dict.fromkeys(source for source, _ in sorted(sources, key=lambda each: order[each[0]]))),
                [each.detach() for each in found],
            )
            order[call] = len(trace.calls)
            trace.calls.append(record)
            numbers = iter(range(len(found)))

            def mark(tensor: torch.Tensor) -> torch.Tensor:
                marked = tensor.as_subclass(_Traced)
                marked.sources, marked.read = frozenset({(call, next(numbers))}), trace.read
                return marked

            return map_tensors(mark, output)

        module.forward = forward

    order: dict[str, int] = {}
    for name in names:
        wrap(name, model.get_submodule(name))
    try:
        loss = loss_fn(_call(model, batch))
        for each in leaves_of(loss):
            if isinstance(each, _Traced):
                trace.read.update(each.sources)
    finally:
        for module, had_own, original in originals:
            if had_own:
                module.forward = original
            else:
                del module.forward
    return trace


def _leaf_like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


# --------------------------------------------------------------------------------------------------------------- times


class _Piece(NamedTuple):
    """Work to time: a forward, and the backward of what it returns."""

    work: Callable[[], Any]
    parameters: tuple[nn.Parameter, ...]
    is_alone: bool
    """Whether a rank would run it alone; else the slowest rank of every repetition counts."""


class _Watch:
    """Times work on all ranks at once.

    Arguments:
        group: the ranks; None is this process alone.
        device: device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._stopwatch = Stopwatch(device)
        is_cuda = device.type == "cuda"
        self.units = (
            torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else torch.get_num_threads()
        )

    def measure(self, pieces: Mapping[Hashable, _Piece]) -> dict[Hashable, tuple[int, int]]:
        """Return median nanoseconds of forward and backward of every piece; they take turns, so that noise is fair."""
        repeats = {}
        for key, piece in pieces.items():
            for _ in range(WARM_UPS):
                self._once(key, piece)
            last = sum(ns for _, ns in self._stopwatch.read()[-2:])
            repeats[key] = min(max(round(BUDGET_NS / max(1.0, self._slowest([last]).item())), LEAST), MOST)
        for turn in range(max(repeats.values())):
            for key, piece in pieces.items():
                if turn < repeats[key]:
                    self._once(key, piece)
        spans: dict[Hashable, list[int]] = {key: [] for key in pieces}
        for found, ns in self._stopwatch.read():
            spans[found].append(ns)
        medians = {}
        for key, piece in pieces.items():
            both = []
            for own in (spans[key][::2], spans[key][1::2]):
                slowest = self._slowest([statistics.median(own)] if piece.is_alone else own)
                both.append(round(slowest.median().item()))
            medians[key] = (both[0], both[1])
        return medians

    def _once(self, key: Hashable, piece: _Piece) -> None:
        """Time one forward and backward; all ranks begin together."""
        if self._group is not None:
            dist.barrier(group=self._group)
        self._stopwatch.begin()
        outputs = [each for each in leaves_of(piece.work()) if isinstance(each, torch.Tensor) and each.requires_grad]
        self._stopwatch.end(key)
        grads = [torch.ones_like(each) for each in outputs]
        for parameter in piece.parameters:
            parameter.grad = None
        self._stopwatch.begin()
        if outputs:
            torch.autograd.backward(outputs, grads)
        self._stopwatch.end(key)

    def _slowest(self, values: Sequence[float]) -> torch.Tensor:
        """Return the largest value of all ranks, by element."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found


def _pieces_of(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any], torch.Tensor],
    trace: _Trace,
    size: int,
    optimizer_states: int,
) -> dict[Hashable, _Piece]:
    """Return what is timed: the step, calls by name and number of devices that divide the samples, updates."""
    pieces: dict[Hashable, _Piece] = {
        REST: _Piece(lambda: loss_fn(_call(model, batch)), tuple(model.parameters()), is_alone=True)
    }
    for record in trace.calls:
        pieces["update", record.module_name] = _Piece(_update_of(record.module, optimizer_states), (), is_alone=True)
        for devices in sorted({*(1 << power for power in range(size.bit_length()) if 1 << power <= size), size}):
            if devices == 1 or _is_divisible(record, trace.samples, devices):
                args, kwargs = _first_part((record.args, record.kwargs), trace.samples, devices)
                work = partial(record.module, *args, **kwargs)
                pieces[record.name, devices] = _Piece(work, tuple(record.module.parameters()), is_alone=devices == 1)
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


def _is_divisible(record: _Record, samples: int, devices: int) -> bool:
    """Return whether samples of a call can be on several devices, with the same result."""
    has_statistics = any(isinstance(each, WITH_STATISTICS) for each in record.module.modules())
    first = next((each for each in leaves_of((record.args, record.kwargs)) if isinstance(each, torch.Tensor)), None)
    is_per_sample = all(each.dim() and each.shape[0] == samples for each in record.outputs)
    return (
        not has_statistics
        and samples % devices == 0
        and first is not None
        and first.dim() > 0
        and first.shape[0] == samples
        and is_per_sample
    )


def _first_part(tree: Any, samples: int, devices: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != samples:
            return tensor
        return _leaf_like(tensor[: samples // devices].detach().requires_grad_(tensor.requires_grad))

    return map_tensors(cut, tree)


def _measure_link(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Return the latency and bandwidth with which a ring sums as fast as the slowest rank here."""
    times = []
    for num_bytes in MESSAGES:
        message = torch.zeros(num_bytes // 4, device=device)
        spans = torch.empty(WARM_UPS + MOST, dtype=torch.float64, device=device)
        for index in range(len(spans)):
            dist.barrier(group=group)
            begin = time.perf_counter()
            dist.all_reduce(message, group=group)
            message[0].item()  # waits for the device
            spans[index] = time.perf_counter() - begin
        dist.all_reduce(spans, op=dist.ReduceOp.MAX, group=group)
        times.append(spans[WARM_UPS:].mean().item())  # a step waits for many of them: their sum counts
    rounds = 2 * (dist.get_world_size(group) - 1)
    per_byte = max(times[1] - times[0], 1e-9) / (MESSAGES[1] - MESSAGES[0])
    return Link(times[0] / rounds, rounds / dist.get_world_size(group) / per_byte)


# ---------------------------------------------------------------------------------------------------------------- work


def _to_work(
    model: nn.Module,
    trace: _Trace,
    measured: Mapping[Hashable, tuple[int, int]],
    cluster: Cluster,
    optimizer_states: int,
) -> StepWork:
    """Return the work of the planner, with the code between the modules as the last call."""
    sizes = {call.name: [n for n in cluster.sizes if (call.name, n) in measured] for call in trace.calls}
    times = {
        name: [
            CallTime(devices=n, units=cluster.units, forward_ns=measured[name, n][0], backward_ns=measured[name, n][1])
            for n in own
        ]
        for name, own in sizes.items()
    }
    alone = {name: found[0] for name, found in times.items()}
    by_module: Counter[str] = Counter()
    for call in trace.calls:
        by_module[call.module_name] += alone[call.name].forward_ns + alone[call.name].backward_ns
    least = LEAST_SHARE * sum(by_module.values())
    kept = [call for call in trace.calls if by_module[call.module_name] >= least and _used(trace, call)]
    if not kept:
        raise DeploymentError("no module was called with tensors in the step: expected some; name them with modules")
    names = {call.name for call in kept}
    read_by: dict[str, tuple[str, ...]] = {}
    """Kept calls that each call reads, also through others."""
    for call in trace.calls:
        found = [(name,) if name in names else read_by[name] for name in call.inputs]
        read_by[call.name] = tuple(dict.fromkeys(itertools.chain.from_iterable(found)))
    calls = [_to_call(call, trace, times[call.name], read_by[call.name], cluster) for call in kept]
    rest = [
        max(0, total - sum(getattr(alone[call.name], f"{kind}_ns") for call in kept))
        for kind, total in zip(("forward", "backward"), measured[REST], strict=True)
    ]
    calls.append(
        Call(
            name=REST,
            module=REST,
            inputs=tuple(call.name for call in kept),
            output_bytes=0,
            activation_bytes=0,
            times=(CallTime(devices=cluster.devices, units=cluster.units, forward_ns=rest[0], backward_ns=rest[1]),),
        )
    )
    placed = dict.fromkeys(call.module_name for call in kept)
    states = [
        _to_state(name, model.get_submodule(name).parameters(), optimizer_states, measured["update", name][0])
        for name in placed
    ]
    owned = {id(p) for name in placed for p in model.get_submodule(name).parameters()}
    left = [p for p in model.parameters() if id(p) not in owned]
    between = _to_state(REST, left, optimizer_states, 0)
    states.append(replace(between, gradient_bytes=0))  # equal on all ranks
    return StepWork(modules=tuple(states), calls=tuple(calls))


def _used(trace: _Trace, call: _Record) -> tuple[int, ...]:
    return tuple(index for index in range(len(call.outputs)) if (call.name, index) in trace.read)


def _to_call(
    call: _Record, trace: _Trace, times: Sequence[CallTime], inputs: tuple[str, ...], cluster: Cluster
) -> Call:
    """Return a call whose times include the transfer of its outputs, and of gradients of inputs, to all ranks."""
    used = _used(trace, call)
    sent = sum(call.outputs[index].nbytes for index in used)
    tensors = [each for each in leaves_of((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]
    returned = sum(each.nbytes for each in tensors if each.requires_grad)

    def transfer_ns(num_bytes: int, parts: int) -> int:
        if not num_bytes or cluster.devices == 1:
            return 0
        return seconds_to_ns(parts * send_seconds(num_bytes / parts, cluster.link))

    return Call(
        name=call.name,
        module=call.module_name,
        inputs=inputs,
        output_bytes=0,
        activation_bytes=_activations(call),
        outputs=used,
        times=tuple(
            CallTime(
                devices=each.devices,
                units=each.units,
                forward_ns=each.forward_ns + transfer_ns(sent, each.devices),
                backward_ns=each.backward_ns + transfer_ns(returned, each.devices),
            )
            for each in times
        ),
    )


def _activations(call: _Record) -> int:
    """Return the bytes that the backward of a call keeps."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in call.module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call.module(*call.args, **call.kwargs)
    del output
    return sum(kept.values())


def _to_state(name: str, parameters: Iterable[nn.Parameter], optimizer_states: int, update_ns: int) -> ModuleState:
    own = list(parameters)
    trained = sum(each.nbytes for each in own if each.requires_grad)
    return ModuleState(
        name=name,
        state_bytes=sum(each.nbytes for each in own) + (1 + optimizer_states) * trained,
        gradient_bytes=trained,
        update_ns=update_ns,
    )
