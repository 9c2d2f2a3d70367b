"""Run a model as a deployment says: `DeploymentPlan.apply`.

    apply_deployment(deployment, model, group) -> model;  full_state_dict(model) -> state on every rank

Every rank runs the model's own code with the whole batch. A module with a group is computed by the ranks of its group
only, each with its share of the samples; then every rank has the whole output, so that the code between modules and the
loss, which all ranks run alike, need not be changed. In the backward, a rank takes its share of the gradient of the
output, gradients of parameters are summed over the replicas, and gradients of inputs go to every rank. So losses and
gradients are those of one process. The ranks of a replica have equal samples, outputs and gradients: DTensor divides
linear layers among them. FSDP2 shards the state of a module over its group.

Note [Order of transfers]
    Transfers are collectives of all ranks. They begin in one order on all ranks, and in the backward in reverse
    (autograd runs the node that was made last first). A rank goes on while outputs of other ranks are under way: an
    output is a tensor that waits when it is used first.

Note [Held calls]
    In the model's forward, calls of placed modules are held back until code between the modules uses one of their
    outputs. Then all held calls begin, level by level: first those that read no output of another. So a rank computes
    its modules before it waits for those of others, in whatever order the code calls them. The calls of a level which a
    rank computes, in plans that give modules shares of its units, are one graph for `torch.compile(backend="apollo")`:
    its plan runs them side by side. The first call of a kind begins at once, since its outputs are not known before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from apollo_compile.distributed.deploy.arriving import Arriving, arrived, arriving
from apollo_compile.distributed.deploy.pairs import random_states
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import REST, Deployment, DeviceGroup, LinearPair
from apollo_compile.torch_bridge.compile_context import compile_apart
from apollo_compile.torch_bridge.private_attributes import times_written
from apollo_compile.torch_bridge.trees import flatten, map_leaves, map_tensors


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of an output, as all ranks have to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Subgroups:
    """Process groups of some ranks of a group."""

    def __init__(self, everyone: dist.ProcessGroup) -> None:
        self.everyone, self.rank, self.size = everyone, dist.get_rank(everyone), dist.get_world_size(everyone)
        self._ranks, self._made = dist.get_process_group_ranks(everyone), dict[range, dist.ProcessGroup]()

    def of(self, lines: Sequence[range]) -> dist.ProcessGroup | None:
        """Return the group of the line that has this rank; None if that is no other rank. All ranks call it alike."""
        for line in lines:
            if len(line) > 1 and line not in self._made:
                self._made[line] = dist.new_group([self._ranks[each] for each in line])
        return next((self._made[line] for line in lines if self.rank in line and len(line) > 1), None)


class DividedModule:
    """A module on this rank, which computes its part of what a group of ranks does."""

    def __init__(
        self, module: nn.Module, group: DeviceGroup, pairs: Sequence[LinearPair], subgroups: Subgroups
    ) -> None:
        self.module, self.group, self.subgroups = module, group, subgroups
        ranks, step = group.range, group.tensor
        self.is_member = subgroups.rank in ranks
        self.device = next((each.device for each in module.state_dict().values()), torch.device("cpu"))
        self.heads = ranks[::step]
        """First ranks of the replicas."""
        replica = subgroups.of([ranks[first : first + step] for first in range(0, len(ranks), step)])
        self.peers = subgroups.of([ranks[index::step] for index in range(step)])
        """Ranks with the same part of every replica, if there are several and this is one of them."""
        self._call: nn.Module = module
        if replica is not None:
            styles: dict[str, ParallelStyle] = {}
            for pair in pairs:
                if pair.degree >= step:
                    styles |= {**dict.fromkeys(pair.columns, ColwiseParallel()), pair.row: RowwiseParallel()}
            mesh = DeviceMesh.from_group(replica, self.device.type)
            parallelize_module(module, mesh, styles, src_data_rank=None)
        elif group.is_sharded and self.peers is not None:
            mesh = DeviceMesh.from_group(self.peers, self.device.type)
            self._call = _Whole(module)  # so that gathering is inside of the module's calls
            for unit in (*units_of(module), self._call):
                sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
                sharded.set_gradient_divide_factor(1.0)  # a sum, as of replicas
                sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def compute(self, args: Sequence[Any], kwargs: dict[str, Any], *, sums: bool = True) -> Any:
        """Run the module; the backward sums gradients over the replicas.

        Raises:
            DeploymentError: ranks of a replica would draw different random numbers.
        """
        before = random_states(self.device) if self.group.tensor > 1 else []
        own = self.summed() if sums else {}
        found = torch.func.functional_call(self._call, own, tuple(args), kwargs) if own else self._call(*args, **kwargs)
        if before and not all(map(torch.equal, before, random_states(self.device))):
            raise DeploymentError(
                f"module {self.group.module!r} draws random numbers, which would differ among {self.group.tensor} "
                "devices per replica: plan again with the model in the mode in which it trains, or move the module"
            )
        # The last layer may have left the sum of its parts under way: a copy of that waits.
        return map_tensors(lambda each: each if type(each) is torch.Tensor else each.clone(), found)

    def summed(self) -> dict[str, torch.Tensor]:
        """Return the parameters as tensors whose gradients are summed over the replicas; empty if none are."""
        own = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        if self.peers is None or self.group.is_sharded or not own or not torch.is_grad_enabled():
            return {}
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in own.values()]
        sums = _SumGradients.apply(self.peers, *parts)  # type: ignore[no-untyped-call]
        return {
            name: DTensor.from_local(part, each.device_mesh, each.placements) if isinstance(each, DTensor) else part
            for (name, each), part in zip(own.items(), sums, strict=True)
        }


class _Whole(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters are gathered one after the other; the rest of a module is one more unit."""
    found: list[nn.Module] = []
    for each in module.children():  # a list of layers is not called, but they are
        is_layer = isinstance(module, nn.Sequential | nn.ModuleList) and not isinstance(each, nn.ModuleList)
        found += ([each] if any(True for _ in each.parameters()) else []) if is_layer else units_of(each)
    return found


class _Placed(DividedModule):
    """A module that a group of ranks computes for all."""

    def __init__(
        self,
        module: nn.Module,
        group: DeviceGroup,
        pairs: Sequence[LinearPair],
        subgroups: Subgroups,
        calls: HeldCalls,
    ) -> None:
        super().__init__(module, group, pairs, subgroups)
        self.original, self.is_inside, self.calls = module.forward, False, calls
        self.known: dict[Any, Any] = {}
        """Outputs by inputs, with `_Leaf` in place of tensors."""

    def part(self, whole: Any, rank: int) -> Any:
        """Return the samples of a rank of the group."""
        if len(self.heads) == 1:
            return whole
        index, count, samples = (rank - self.group.first) // self.group.tensor, len(self.heads), len(whole)
        return whole[samples * index // count : samples * (index + 1) // count]

    def share(self, whole: torch.Tensor) -> list[dist.Work]:
        """Begin to send the parts of a contiguous tensor to all ranks."""
        parts = [(rank, self.part(whole, rank)) for rank in self.heads]
        return [_broadcast(part, self.subgroups.everyone, rank) for rank, part in parts]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or receive its output."""
        if self.is_inside:
            return self.original(*args, **kwargs)
        leaves, structure, build = flatten((args, kwargs))
        likes = [each.like if isinstance(each, Arriving) else each for each in leaves if isinstance(each, torch.Tensor)]
        samples = next((each.shape[0] for each in likes if each.dim()), 0)
        if samples < len(self.heads):
            raise DeploymentError(
                f"module {self.group.module!r} got {samples} samples for {len(self.heads)} replicas; expected at least "
                "one for each: give larger batches, or move the module to fewer devices"
            )
        is_moving = tuple(torch.is_grad_enabled() and each.requires_grad for each in likes)
        key = (structure, tuple((tuple(each.shape), each.dtype) for each in likes), is_moving, torch.is_grad_enabled())
        return self.calls.add(_Call(placed=self, leaves=leaves, build=build, samples=samples, key=key))

    def enter(self, call: _Call) -> torch.Tensor:
        """Let gradients of a call's inputs go to all ranks; return a token that links its outputs to that.

        Ranks that do not compute the module do not wait for its inputs.
        """
        has_gradients = torch.is_grad_enabled()
        if self.is_member:
            call.leaves = arrived(call.leaves)
        leaves = call.leaves = [each.plain if isinstance(each, Arriving) else each for each in call.leaves]
        moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        token = torch.zeros((), device=self.device, requires_grad=has_gradients)
        if has_gradients:
            token, *entered = _Enter.apply(self, call.samples, token, *(leaves[index] for index in moving))  # type: ignore[no-untyped-call]
            for index, value in zip(moving, entered, strict=True):
                leaves[index] = value
        return token

    def own_inputs(self, call: _Call) -> Any:
        """Return the arguments of a call with this rank's samples: positional ones, and others by name."""
        return call.build(
            [
                self.part(leaf, self.subgroups.rank)
                if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (call.samples,)
                else leaf
                for leaf in call.leaves
            ]
        )

    def compute_own(self, call: _Call) -> Any:
        """Return what the module makes of this rank's samples."""
        args, kwargs = self.own_inputs(call)
        self.is_inside = True
        try:
            return self.compute(args, kwargs)
        finally:
            self.is_inside = False

    def leave(self, call: _Call, token: torch.Tensor, made: Any) -> Any:
        """Begin to send what this rank made of a call, and to receive the rest; return the output."""
        specs, _, rebuild = flatten(self._describe(call.key, made, call.samples))
        sent = [index for index, spec in enumerate(specs) if isinstance(spec, _Leaf)]
        values = flatten(made)[0] if self.is_member else [None] * len(specs)
        works: list[list[dist.Work]] = []
        results = _Leave.apply(  # type: ignore[no-untyped-call]
            self, [specs[index] for index in sent], works, token, *(values[index] for index in sent)
        )
        for index, result, pending in zip(sent, results, works, strict=True):
            specs[index] = arriving(result, result, [work.wait for work in pending], self.group.module)
        return rebuild(specs)

    def _describe(self, key: Any, made: Any, samples: int) -> Any:
        """Return the output with `_Leaf` in place of tensors; the first rank of the group tells the others, once."""
        if key not in self.known:
            first, is_divided = self.group.first, len(self.heads) > 1
            count = len(self.part(range(samples), first))

            def describe(tensor: torch.Tensor) -> _Leaf:
                shape = tuple(tensor.shape)
                if is_divided and shape[:1] != (count,):
                    raise DeploymentError(
                        f"module {self.group.module!r} returned a tensor of shape {shape} for {count} samples, so its "
                        "samples cannot be divided over devices; move it to one device"
                    )
                return _Leaf((samples, *shape[1:]) if is_divided else shape, tensor.dtype, tensor.requires_grad)

            told = [map_tensors(describe, made) if self.subgroups.rank == first else None]
            dist.broadcast_object_list(told, group=self.subgroups.everyone, group_src=first)
            self.known[key] = told[0]
        return self.known[key]


@dataclass(eq=False, kw_only=True, slots=True)
class _Call:
    """A call of a placed module."""

    placed: _Placed
    leaves: list[Any]
    """Of its arguments."""
    build: Callable[[Sequence[Any]], Any]
    """Builds the arguments of leaves."""
    samples: int
    key: Any
    """Of its output among those that are known."""
    held: list[Arriving] = field(default_factory=list)
    """Its outputs, if it was held back."""
    written: list[int] = field(init=False)
    """How often its inputs had been written to before it."""

    def __post_init__(self) -> None:
        self.written = self.count_writes()

    def count_writes(self) -> list[int]:
        """Return how often each input that is there has been written to."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return [0 if isinstance(each, Arriving) else times_written(each) for each in tensors]


class HeldCalls:
    """Calls that begin when an output is used: Note [Held calls].

    Arguments:
        shares: whether modules share the units of a device.
        options: of the backend that compiles calls which begin together.
    """

    def __init__(self, *, shares: bool, options: Mapping[str, Any]) -> None:
        self._shares, self._options = shares, dict(options)
        self._is_open = False
        self._calls: list[_Call] = []
        self._settings: tuple[Any, ...] = ()
        """Gradients and autocast under which they were made."""
        self._compiled: dict[tuple[_Placed, ...], Callable[..., Any]] = {}

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, in which calls are held back; elsewhere each begins at once."""
        self._is_open = True
        try:
            found = original(*args, **kwargs)
            self.begin()
            return found
        finally:
            self._is_open = False
            self._calls.clear()

    def add(self, call: _Call) -> Any:
        """Return the outputs of a call."""
        kind = call.placed.device.type
        settings = (torch.is_grad_enabled(), kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        specs = call.placed.known.get(call.key) if self._is_open else None
        if specs is None or settings != self._settings:
            self.begin()
        if specs is None:
            return self._run([call])[0]
        self._settings = settings
        self._calls.append(call)

        def hold(spec: _Leaf) -> Arriving:
            like = torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
            call.held.append(arriving(None, like, [self.begin], call.placed.group.module))
            return call.held[-1]

        return map_leaves(_Leaf, hold, specs)

    def begin(self) -> None:
        """Begin the calls that were held back, level by level."""
        calls, self._calls = self._calls, []
        if changed := [call for call in calls if call.count_writes() != call.written]:
            raise DeploymentError(
                f"an input of module {changed[0].placed.group.module!r} was written to before the module ran, which it "
                "does when an output is used: give it a copy"
            )
        while calls:
            level = [
                call for call in calls if not any(isinstance(x, Arriving) and x.plain is None for x in call.leaves)
            ]
            calls = [call for call in calls if call not in level]
            has_gradients, kind, dtype, is_cast = self._settings
            with torch.set_grad_enabled(has_gradients), torch.autocast(kind, dtype=dtype, enabled=is_cast):
                results = self._run(level)
            for call, result in zip(level, results, strict=True):
                found = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Arriving)]
                for held, here in zip(call.held, found, strict=True):
                    held.plain, held.like, held.waits = here.plain, here.like, here.waits

    def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """Return the outputs of calls that do not read each other's; all ranks begin the same calls."""
        tokens = [call.placed.enter(call) for call in calls]
        own = [call for call in calls if call.placed.is_member]
        together = [call for call in own if self._shares and not call.placed.group.kind]
        made = self._compute_together(together) if len(together) > 1 else {}
        made |= {call: call.placed.compute_own(call) for call in own if call not in made}
        return [call.placed.leave(call, token, made.get(call)) for call, token in zip(calls, tokens, strict=True)]

    def _compute_together(self, calls: Sequence[_Call]) -> dict[_Call, Any]:
        """Return what modules make of this rank's samples, computed by one graph."""
        placed = tuple(call.placed for call in calls)
        if placed not in self._compiled:
            together = _Together(placed)
            self._compiled[placed] = compile_apart(together, backend="apollo", dynamic=False, options=self._options)
        for each in placed:
            each.is_inside = True
        try:
            found = self._compiled[placed](
                [each.summed() for each in placed], [call.placed.own_inputs(call) for call in calls]
            )
        finally:
            for each in placed:
                each.is_inside = False
        return dict(zip(calls, found, strict=True))


class _Together(nn.Module):
    """Modules that are computed by one graph."""

    def __init__(self, placed: Sequence[_Placed]) -> None:
        super().__init__()
        names = (f"{each.group.module.replace('.', '_')}_{number}" for number, each in enumerate(placed))
        self.parts = nn.ModuleDict(dict(zip(names, (each.module for each in placed), strict=True)))

    def forward(self, states: Sequence[dict[str, torch.Tensor]], inputs: Sequence[tuple[Any, dict[str, Any]]]) -> Any:
        """Return the outputs by module; a state replaces a module's parameters."""
        calls = zip(self.parts.values(), states, inputs, strict=True)
        return [torch.func.functional_call(module, state, args, kwargs) for module, state, (args, kwargs) in calls]


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, rank: int) -> dist.Work:
    work: dist.Work = dist.broadcast(tensor, group=group, group_src=rank, async_op=True)
    return work


class _Enter(torch.autograd.Function):
    """Inputs with gradients: each rank's gradient of its samples goes to all ranks."""

    @staticmethod
    def forward(ctx: Any, placed: _Placed, samples: int, token: torch.Tensor, *inputs: torch.Tensor) -> Any:
        """Return the token, which links the outputs to this, and the inputs."""
        ctx.placed, ctx.samples = placed, samples
        ctx.shapes = [(each.shape, each.dtype) for each in inputs]
        return token.view_as(token), *(each.view_as(each) for each in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor, *grads: torch.Tensor) -> Any:
        """Return the gradients of all samples."""
        placed, found, works = ctx.placed, [], []
        for grad, (shape, dtype) in zip(grads, ctx.shapes, strict=True):
            whole = torch.empty(shape, dtype=dtype, device=placed.device)
            if placed.is_member:
                whole.copy_(grad)
            if len(placed.heads) == 1 or shape[:1] == (ctx.samples,):
                works += placed.share(whole)
            else:  # every replica has a part of the sum
                if placed.is_member:
                    dist.all_reduce(whole, group=placed.peers)
                works.append(_broadcast(whole, placed.subgroups.everyone, placed.group.first))
            found.append(whole)
        for work in works:
            work.wait()
        return None, None, None, *found


class _Leave(torch.autograd.Function):
    """Outputs: each rank's samples go to all ranks; the backward takes this rank's samples of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        placed: _Placed,
        specs: list[_Leaf],
        works: list[list[dist.Work]],
        token: torch.Tensor,
        *values: torch.Tensor | None,
    ) -> Any:
        """Return the whole outputs, which may still be under way."""
        ctx.placed = placed
        ctx.set_materialize_grads(False)  # parameters behind unused outputs have no gradient
        found = []
        for spec, value in zip(specs, values, strict=True):
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=token.device)
            if value is not None:
                placed.part(whole, placed.subgroups.rank).copy_(value)
            works.append(placed.share(whole))
            found.append(whole)
        ctx.mark_non_differentiable(
            *(whole for whole, spec in zip(found, specs, strict=True) if not spec.requires_grad)
        )
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of this rank's outputs."""
        placed = ctx.placed
        own = [
            placed.part(grad, placed.subgroups.rank) if placed.is_member and grad is not None else None
            for grad in grads
        ]
        return None, None, None, torch.zeros((), device=placed.device), *own


class _SumGradients(torch.autograd.Function):
    """Parameters whose gradients are summed over a group."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parameters: torch.Tensor) -> Any:
        """Return the parameters."""
        ctx.group = group
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the sums."""
        found = list(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            members = [index for index, grad in enumerate(grads) if grad.dtype == dtype]
            flat = torch.cat([grads[index].reshape(-1) for index in members])
            dist.all_reduce(flat, group=ctx.group)
            parts = torch.split(flat, [grads[index].numel() for index in members])
            for index, part in zip(members, parts, strict=True):
                found[index] = part.view_as(grads[index])
        return None, *found


_placed: weakref.WeakKeyDictionary[nn.Module, list[_Placed]] = weakref.WeakKeyDictionary()
"""Modules that run on groups, by model."""


def apply_deployment(
    deployment: Deployment, model: nn.Module, everyone: dist.ProcessGroup, options: Mapping[str, Any]
) -> nn.Module:
    """Let the modules of a model run on their groups, and return the model; all ranks call it.

    On ranks that do not compute a module, its parameters move to the device "meta" and take no memory.

    Raises:
        DeploymentError: the plan is for another number of devices or another model.
    """
    if (size := dist.get_world_size(everyone)) != deployment.cluster.devices:
        raise DeploymentError(
            f"the plan is for {deployment.cluster.devices} devices, and there are {size} ranks; plan again with deploy"
        )
    if model in _placed:
        raise DeploymentError("a plan has been applied to this model; build the model again to apply another")
    groups = [group for group in deployment.groups if group.module != REST]
    modules = dict(model.named_modules())
    if unknown := [group.module for group in groups if group.module not in modules]:
        raise DeploymentError(f"the plan is for another model: there is no module {unknown[0]!r}")
    pairs_of = {each.name: each.pairs for each in deployment.work.modules}
    for own in (group.module for group in groups if group.tensor > 1):
        for name, axis, degree in [(n, n == p.row, p.degree) for p in pairs_of[own] for n in (*p.columns, p.row)]:
            layer = modules.get(f"{own}.{name}")
            if not (isinstance(layer, nn.Linear) and layer.weight.shape[axis] % degree == 0):
                raise DeploymentError(
                    f"the plan divides {own}.{name} over {degree} devices: expected a linear layer whose size is a "
                    f"multiple of that, got {layer}; plan again with deploy"
                )
    subgroups, units = Subgroups(everyone), deployment.cluster.units
    calls = HeldCalls(shares=any(group.units < units for group in groups), options=options)
    model.forward = functools.partial(calls.forward, model.forward)
    for group in groups:
        module = modules[group.module]
        placed = _Placed(module, group, pairs_of[group.module], subgroups, calls)
        if not placed.is_member:
            module.to_empty(device="meta")
        module.forward = placed.run
        _placed.setdefault(model, []).append(placed)
    return model


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of all modules of a model with a plan, on every rank; all ranks call it."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for placed in _placed.get(model, ()):
        for name in (f"{placed.group.module}.{own}" for own in placed.module.state_dict()):
            value = state[name]
            if isinstance(value, DTensor):  # its ranks collect it
                value = value.full_tensor()
            state[name] = torch.empty_like(value, device=placed.device) if value.is_meta else value.contiguous()
            _broadcast(state[name], placed.subgroups.everyone, placed.group.first).wait()
    return state
