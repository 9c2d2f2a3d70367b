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
    its modules before it waits for those of others, in whatever order the code calls them. The first call with inputs
    of a shape begins at once, since its outputs are not known before. Where a plan gives modules shares of a device's
    units, the calls of a level that a rank computes are one graph for `torch.compile(backend="apollo")`, whose plan
    runs them side by side; calls with outputs that got no gradient are left out, since a graph would give zeros to
    parameters behind them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from apollo_compile.distributed.deploy.arriving import Arriving, arrived, arriving
from apollo_compile.distributed.deploy.divided import DividedModule, Subgroups
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import REST, Deployment, DeviceGroup, LinearPair
from apollo_compile.torch_bridge.compile_context import compile_apart
from apollo_compile.torch_bridge.private_attributes import times_written
from apollo_compile.torch_bridge.trees import flatten, leaves_of, map_tensors


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
        self.original, self.calls = module.forward, calls
        self.specs: dict[Any, Any] = {}
        """Outputs by inputs, with tensors on the device "meta"."""
        self.used: set[Any] = set()
        """Inputs for which all outputs that have gradients got some."""

    def part(self, whole: Any, rank: int) -> Any:
        """Return the samples of a rank of the group."""
        if len(self.heads) == 1:
            return whole
        index, count, samples = (rank - self.group.first) // self.group.tensor, len(self.heads), len(whole)
        return whole[samples * index // count : samples * (index + 1) // count]

    def share(self, whole: torch.Tensor) -> list[dist.Work]:
        """Begin to send the parts of a contiguous tensor to all ranks."""
        group = self.subgroups.everyone
        return [dist.broadcast(self.part(whole, n), group=group, group_src=n, async_op=True) for n in self.heads]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or return its outputs, which may be under way."""
        if self.calls.is_computing:
            return self.original(*args, **kwargs)
        leaves, structure, build = flatten((args, kwargs))
        tensors = leaves_of(leaves, torch.Tensor)
        samples = next((each.shape[0] for each in tensors if each.dim()), 0)
        if samples < len(self.heads):
            raise DeploymentError(
                f"module {self.group.module!r} got {samples} samples for {len(self.heads)} replicas; expected at least "
                "one for each: give larger batches, or move the module to fewer devices"
            )
        cast = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        settings = _Settings(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast)
        kinds = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
        plain = tuple(leaf if isinstance(leaf, int | float | str | None) else type(leaf) for leaf in leaves)
        trained = sum(each.requires_grad for each in self.module.parameters())
        key = (structure, kinds, plain, settings, self.module.training, trained)
        return self.calls.add(_Call(self, leaves, build, samples, settings, key))

    def own_inputs(self, call: _Call) -> Any:
        """Return the arguments of a call with this rank's samples: positional ones, and others by name."""

        def own(leaf: Any) -> Any:
            is_divided = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (call.samples,)
            return self.part(leaf, self.subgroups.rank) if is_divided else leaf

        return call.build(list(map(own, call.leaves)))

    def learn(self, call: _Call, made: Any) -> None:
        """Let all ranks know the outputs of such calls; the first rank of the group tells the others, once."""
        if call.key in self.specs:
            return
        first, count = self.group.first, len(self.part(range(call.samples), self.group.first))

        def spec(tensor: torch.Tensor) -> torch.Tensor:
            shape = tuple(tensor.shape)
            if len(self.heads) > 1:
                if shape[:1] != (count,):
                    raise DeploymentError(
                        f"module {self.group.module!r} returned a tensor of shape {shape} for {count} samples, so its "
                        "samples cannot be divided over devices; move it to one device"
                    )
                shape = (call.samples, *shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        told = [map_tensors(spec, made) if self.subgroups.rank == first else None]
        dist.broadcast_object_list(told, group=self.subgroups.everyone, group_src=first)
        self.specs[call.key] = told[0]


class _Settings(NamedTuple):
    """Settings of torch under which a module is called."""

    has_gradients: bool
    is_inference: bool
    cast: torch.dtype | None
    """The type of autocast; None if it is off."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call of a placed module."""

    placed: _Placed
    leaves: list[Any]
    """Leaves of the arguments."""
    build: Callable[[Sequence[Any]], Any]
    """Builds the arguments of leaves."""
    samples: int
    settings: _Settings
    key: Any
    """Everything on which shapes and types of the outputs depend."""
    state: Any = None
    """The `current_state` when it was held back."""
    output: Any = None
    """What it returns, with `held` in place of tensors."""
    held: Sequence[Arriving] = ()

    def current_state(self) -> list[Any]:
        """Return how often each input has been written to, and whether the module trains."""
        tensors = [each.plain if isinstance(each, Arriving) else each for each in self.leaves]
        return [*map(times_written, leaves_of(tensors, torch.Tensor)), self.placed.module.training]

    def hold(self, *waits: Callable[[], Any]) -> None:
        """Make outputs, which have arrived when `waits` were called and there is a tensor."""
        self.output = map_tensors(lambda spec: arriving(spec, waits), self.placed.specs[self.key])
        self.held = leaves_of(self.output, Arriving)

    @property
    def may_join(self) -> bool:
        """Whether a graph of several calls gives the parameters the gradients that this call alone would."""
        has_gradients = any(each.requires_grad for each in leaves_of(self.placed.specs.get(self.key), torch.Tensor))
        return not self.placed.group.kind and (self.key in self.placed.used or not has_gradients)


class HeldCalls:
    """Calls that begin when an output is used: Note [Held calls].

    Arguments:
        options: options of the backend that compiles calls of modules which share a device; None if none do.
    """

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self.is_computing = False
        """Whether placed modules compute what this rank has to."""
        self._options = options
        self._is_open = False
        self._calls: list[_Call] = []
        self._compiled: dict[tuple[_Placed, ...], Callable[..., Any]] = {}

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, in which calls are held back; elsewhere each begins at once."""
        self._is_open = True
        try:
            found = original(*args, **kwargs)
            self.begin()
            return arrived(found)
        finally:
            self._is_open = False
            self._calls.clear()

    def add(self, call: _Call) -> Any:
        """Return the outputs of a call."""
        is_held = self._is_open and call.key in call.placed.specs
        if not is_held or (self._calls and call.settings != self._calls[0].settings):
            self.begin()
        if is_held:
            call.state = call.current_state()
            call.hold(self.begin)
            self._calls.append(call)
        else:
            self._run([call])
        return call.output

    def begin(self) -> None:
        """Begin the calls that were held back, level by level."""
        calls, self._calls = self._calls, []
        if changed := [call for call in calls if call.current_state() != call.state]:
            raise DeploymentError(
                f"an input of module {changed[0].placed.group.module!r} was written to, or its mode changed, before "
                "the module ran, which it does when an output is used: give it a copy, or change the mode earlier"
            )
        while calls:
            waiting = {id(output) for call in calls for output in call.held}
            level = [call for call in calls if waiting.isdisjoint(map(id, call.leaves))]
            calls = [call for call in calls if call not in level]
            settings, device = level[0].settings, level[0].placed.device
            autocast = torch.autocast(device.type, dtype=settings.cast, enabled=settings.cast is not None)
            with torch.inference_mode(settings.is_inference), torch.set_grad_enabled(settings.has_gradients), autocast:
                self._run(level)

    def _run(self, calls: Sequence[_Call]) -> None:
        """Begin calls that do not read each other's outputs; all ranks begin the same ones.

        Those of modules that share a device have one node of autograd before them and one behind them, on all ranks:
        a graph has one backward, so that the gradient of one output lets all of them run.
        """
        joined = [call for call in calls if self._options is not None and call.may_join]
        groups = [group for group in (joined, *([call] for call in calls if call not in joined)) if group]
        tokens, made = [], dict[_Call, Any]()
        for group in groups:
            tokens.append(_enter(group))
            made |= self._compute([call for call in group if call.placed.is_member])
        for group, token in zip(groups, tokens, strict=True):
            _leave(group, token, made)

    def _compute(self, calls: Sequence[_Call]) -> dict[_Call, Any]:
        """Return what modules make of this rank's samples; several are computed by one graph."""
        inputs, placed = [call.placed.own_inputs(call) for call in calls], tuple(call.placed for call in calls)
        self.is_computing = True
        try:
            if len(calls) <= 1:
                found = [each.compute(*args, **kwargs) for each, (args, kwargs) in zip(placed, inputs, strict=True)]
            else:
                if placed not in self._compiled:
                    self._compiled[placed] = compile_apart(
                        _Together(placed), backend="apollo", dynamic=False, options=dict(self._options or {})
                    )
                found = self._compiled[placed]([each.summed() for each in placed], inputs)
        finally:
            self.is_computing = False
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


def _enter(calls: Sequence[_Call]) -> torch.Tensor:
    """Let gradients of inputs go to all ranks; return a token that links the outputs to that.

    Ranks that do not compute a module do not wait for its inputs.
    """
    has_gradients, moving = torch.is_grad_enabled(), list[tuple[_Call, int]]()
    for call in calls:
        if call.placed.is_member:
            call.leaves = arrived(call.leaves)
        call.leaves = [each.plain if isinstance(each, Arriving) else each for each in call.leaves]
        for index, each in enumerate(call.leaves):
            if has_gradients and isinstance(each, torch.Tensor) and each.requires_grad:
                moving.append((call, index))
    begin = torch.zeros((), device=calls[0].placed.device, requires_grad=has_gradients)
    inputs = [call.leaves[index] for call, index in moving]
    token: torch.Tensor
    token, *entered = _Enter.apply([call for call, _ in moving], begin, *inputs)  # type: ignore[no-untyped-call]
    for (call, index), value in zip(moving, entered, strict=True):
        call.leaves[index] = value
    return token


def _leave(calls: Sequence[_Call], token: torch.Tensor, made: Mapping[_Call, Any]) -> None:
    """Begin to send what this rank made of calls, and to receive the rest, into the outputs of the calls."""
    sent: list[tuple[_Call, torch.Tensor]] = []
    values: list[torch.Tensor | None] = []
    for call in calls:
        call.placed.learn(call, made.get(call))
        if not call.held:
            call.hold()
        specs = leaves_of(call.placed.specs[call.key], torch.Tensor)
        sent += [(call, spec) for spec in specs]
        values += leaves_of(made[call], torch.Tensor) if call in made else [None] * len(specs)
    works: list[list[dist.Work]] = []
    wholes = _Leave.apply(sent, works, token, *values)  # type: ignore[no-untyped-call]
    outputs = [output for call in calls for output in call.held]
    for output, whole, own in zip(outputs, wholes, works, strict=True):
        output.plain, output.waits = whole, [work.wait for work in own]


class _Enter(torch.autograd.Function):
    """Inputs with gradients: each rank's gradient of its samples goes to all ranks."""

    @staticmethod
    def forward(ctx: Any, owners: Sequence[_Call], token: torch.Tensor, *inputs: torch.Tensor) -> Any:
        """Return the token, which links the outputs to this, and the inputs."""
        ctx.inputs = [(c.placed, c.samples, each.shape, each.dtype) for c, each in zip(owners, inputs, strict=True)]
        return token.view_as(token), *(each.view_as(each) for each in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor, *grads: torch.Tensor) -> Any:
        """Return the gradients of all samples."""
        found, works = [], []
        for grad, (placed, samples, shape, dtype) in zip(grads, ctx.inputs, strict=True):
            whole = torch.empty(shape, dtype=dtype, device=placed.device)
            if placed.is_member:
                whole.copy_(grad)
            if len(placed.heads) == 1 or shape[:1] == (samples,):
                works += placed.share(whole)
            else:  # every replica has a part of the sum
                if placed.is_member:
                    dist.all_reduce(whole, group=placed.peers)
                sender, group = placed.group.first, placed.subgroups.everyone
                works.append(dist.broadcast(whole, group=group, group_src=sender, async_op=True))
            found.append(whole)
        for work in works:
            work.wait()
        return None, None, *found


class _Leave(torch.autograd.Function):
    """Outputs: each rank's samples go to all ranks; the backward takes this rank's samples of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: Sequence[tuple[_Call, torch.Tensor]],
        works: list[list[dist.Work]],
        token: torch.Tensor,
        *values: torch.Tensor | None,
    ) -> Any:
        """Return the whole outputs, which may still be under way."""
        ctx.sent = [(call.placed, call.key, spec.requires_grad) for call, spec in sent]
        ctx.set_materialize_grads(False)  # parameters behind unused outputs have no gradient
        found = []
        for (call, spec), value in zip(sent, values, strict=True):
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=token.device)
            if value is not None:
                call.placed.part(whole, call.placed.subgroups.rank).copy_(value)
            works.append(call.placed.share(whole))
            found.append(whole)
        fixed = [whole for whole, (_, spec) in zip(found, sent, strict=True) if not spec.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of this rank's outputs."""
        own, unused = [], set[tuple[_Placed, Any]]()
        for grad, (placed, key, requires_grad) in zip(grads, ctx.sent, strict=True):
            is_mine = placed.is_member and grad is not None
            own.append(placed.part(grad, placed.subgroups.rank) if is_mine else None)
            if requires_grad and grad is None:
                unused.add((placed, key))
        for placed, key in {(placed, key) for placed, key, _ in ctx.sent} - unused:
            placed.used.add(key)
        return None, None, torch.zeros((), device=ctx.sent[0][0].device), *own


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
    device = next((each.device for each in model.state_dict().values()), torch.device("cpu"))
    subgroups = Subgroups(everyone, device)
    calls = HeldCalls(options if any(group.units < deployment.cluster.units for group in groups) else None)
    forward = model.forward
    model.forward = functools.update_wrapper(functools.partial(calls.forward, forward), forward)
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
            dist.broadcast(state[name], group=placed.subgroups.everyone, group_src=placed.group.first)
    return state
