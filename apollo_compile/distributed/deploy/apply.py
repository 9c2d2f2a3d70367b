"""Run a model as a deployment says: `DeploymentPlan.apply`.

    apply_deployment(deployment, model, group) -> model

Every rank runs the model's own code with the whole batch. A module with a group is computed by the ranks of its group
only, each with its share of the samples; then every rank has the whole output, so that the code between modules and the
loss, which all ranks run alike, need not be changed. In the backward, a rank takes its share of the gradient of the
output, gradients of parameters are summed over the replicas, and gradients of inputs go to every rank. So losses and
gradients are those of one process.

Note [Order of transfers]
    Transfers are collectives of all ranks. They begin in one order on all ranks, and in the backward in reverse: all
    ranks have one graph of autograd, in which a call is a node that holds the graph of this rank's samples. A rank goes
    on while outputs of other ranks are under way: an output is a tensor that waits when it is used first.

Note [Held calls]
    In the model's forward, calls of placed modules are held back until code between the modules uses one of their
    outputs. Then all held calls begin, level by level: first those that read no output of another. So a rank computes
    its modules before it waits for those of others, in whatever order the code calls them. The first call with inputs
    of a shape begins at once, since its outputs are not known before, and so do calls where code turns gradients off or
    on: it may be a function with a backward of its own, as of a checkpoint. Where a plan gives modules shares of a
    device, the calls of a level that a rank computes are one graph for `torch.compile(backend="apollo")`, whose plan
    runs them side by side, but for those with unused outputs: a graph gives zeros to parameters behind these.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from apollo_compile.distributed.deploy.arriving import Arriving, arrived
from apollo_compile.distributed.deploy.divided import DividedModule, Subgroups, map_samples, placed_modules
from apollo_compile.distributed.link import sum_gradients, tell
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import REST, Deployment
from apollo_compile.torch_bridge.compile_context import compile_apart
from apollo_compile.torch_bridge.nested_graph import run_nested
from apollo_compile.torch_bridge.private_attributes import keeps_graph, times_written
from apollo_compile.torch_bridge.trees import flatten_objects, leaves_of, map_tensors

_Leaf: TypeAlias = tuple[DividedModule, int | None, torch.Tensor, torch.Tensor]
"""A module, samples of its call (None of a parameter), a tensor with a gradient, and its copy in this rank's graph."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call of a placed module."""

    placed: DividedModule
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional ones, and others by name."""
    samples: int
    settings: tuple[bool, bool, torch.dtype | None]
    """Whether there are gradients, whether inference mode is on, and the type of autocast; None if it is off."""
    key: Any
    """The module, and everything on which shapes and types of its outputs depend."""
    state: Any = None
    """The `current_state` when it was held back."""
    output: Any = None
    """What it returns, with `held` in place of tensors."""
    held: Sequence[Arriving] = ()
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """The module's; those that are trained are leaves of this rank's graph."""

    def current_state(self) -> list[Any]:
        """Return how often each input has been written to, and whether the module trains."""
        tensors = leaves_of(arrived(self.inputs, waits=False), torch.Tensor)
        return [*map(times_written, tensors), self.placed.module.training]

    def enter(self) -> list[_Leaf]:
        """Let this rank's graph begin with inputs and parameters that get gradients; FSDP2 sums those of its own."""
        placed, found = self.placed, list[_Leaf]()

        def begin(tensor: torch.Tensor, samples: int | None = None) -> torch.Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            copy = tensor.detach() if placed.is_member else torch.empty_like(tensor, device="meta")
            copy = nn.Parameter(copy) if samples is None else copy.requires_grad_()
            found.append((placed, samples, tensor, copy))
            return copy

        inputs = arrived(self.inputs, waits=placed.is_member)  # others do not wait
        self.inputs = map_tensors(lambda each: begin(each, self.samples), inputs)
        if placed.is_member and not placed.group.is_sharded:
            self.parameters = {name: begin(each) for name, each in placed.module.named_parameters()}
        return found

    def hold(self, outputs: Any, *waits: Callable[[], Any]) -> None:
        """Make outputs like others, which have arrived when `waits` were called and there is a tensor."""
        self.state = self.current_state()
        self.output = map_tensors(lambda each: Arriving(each, waits), outputs)
        self.held = leaves_of(self.output, Arriving)


def _call_of(placed: DividedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    leaves, structure, _ = flatten_objects((args, kwargs))
    tensors, replicas, kind = leaves_of(leaves, torch.Tensor), placed.group.replicas, placed.device.type
    samples = next((len(each) for each in tensors if each.dim() and len(each)), 0)
    if samples < replicas:
        raise DeploymentError(
            f"module {placed.group.module!r} got {samples} samples for {replicas} replicas; expected at least one for "
            "each: give larger batches, or move the module to fewer devices"
        )
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast)
    kinds = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
    plain = tuple(leaf if isinstance(leaf, int | float | str | None) else type(leaf) for leaf in leaves)
    trained = sum(each.requires_grad for each in placed.module.parameters())
    key = (placed, structure, kinds, plain, settings, placed.module.training, trained)
    return _Call(placed, (args, kwargs), samples, settings, key)


class HeldCalls:
    """Calls that begin when an output is used: Note [Held calls]; options are of their graphs, if there are any."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        compile_graph = functools.partial(compile_apart, backend="apollo", dynamic=False, options=dict(options or {}))
        self._compile = functools.cache(lambda placed: compile_graph(_Together(placed)))
        self._may_join = options is not None
        self._is_computing = False
        self._has_gradients: bool | None = None
        """Whether the model's forward has gradients, while it runs."""
        self._calls: list[_Call] = []
        self._outputs: dict[Any, Any] = {}
        """Outputs by key of a call, with tensors on the device "meta"."""
        self._used: set[Any] = set()
        """Keys of calls of which all outputs that have gradients got some."""

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, in which calls are held back; elsewhere each begins at once."""
        self._has_gradients = torch.is_grad_enabled()
        try:
            found = original(*args, **kwargs)
            self.begin()
            return arrived(found)
        finally:
            self._has_gradients = None
            self._calls.clear()

    def call(self, placed: DividedModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a module, which may be under way; while this rank computes, run its own forward."""
        if self._is_computing:
            return original(*args, **kwargs)
        call = _call_of(placed, args, kwargs)
        is_open = self._has_gradients is torch.is_grad_enabled()
        is_held = is_open and call.key in self._outputs
        if not is_held or (self._calls and call.settings != self._calls[0].settings):
            self.begin()
        if is_held:
            call.hold(self._outputs[call.key], self.begin)
            self._calls.append(call)
        else:
            self._run([call])
        return call.output if is_open else arrived(call.output)

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
            level = [call for call in calls if waiting.isdisjoint(map(id, leaves_of(call.inputs)))]
            calls = [call for call in calls if call not in level]
            has_gradients, is_inference, cast = level[0].settings
            autocast = torch.autocast(level[0].placed.device.type, dtype=cast, enabled=cast is not None)
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients), autocast:
                self._run(level)

    def _run(self, calls: Sequence[_Call]) -> None:
        """Begin calls that do not read each other's outputs; all ranks begin the same ones.

        Those of modules that share a device are one node, on all ranks: a graph has one backward, so that the gradient
        of one output lets all of them run.
        """
        joined = [call for call in calls if self._may_join and call.key in self._used and not call.placed.group.kind]
        for group in filter(None, (joined, *([call] for call in calls if call not in joined))):
            self._send(group)

    def _send(self, calls: Sequence[_Call]) -> None:
        """Compute this rank's samples of calls, and begin to send and to receive their outputs."""
        leaves = [leaf for call in calls for leaf in call.enter()]
        failures = calls[0].placed.subgroups.failures
        with failures.telling(call.placed.group.module for call in calls):
            made = self._compute([call for call in calls if call.placed.is_member])
        sent: list[tuple[_Call, Arriving, torch.Tensor | None]] = []
        for call in calls:
            if call.key not in self._outputs:
                self._learn(call, made.get(call))
            if not call.held:
                call.hold(self._outputs[call.key])
            own = leaves_of(made[call], torch.Tensor) if call in made else [None] * len(call.held)
            sent += [(call, output, value) for output, value in zip(call.held, own, strict=True)]
        begin = torch.zeros((), device=calls[0].placed.device, requires_grad=torch.is_grad_enabled())
        wholes = _Node.apply(leaves, sent, self._used, begin, *(tensor for _, _, tensor, _ in leaves))  # type: ignore[no-untyped-call]
        for (call, output, _), whole in zip(sent, wholes, strict=True):
            works = call.placed.share(whole.detach())
            output.plain, output.waits = whole, [functools.partial(failures.wait, work) for work in works]

    def _learn(self, call: _Call, made: Any) -> None:
        """Let all ranks know the outputs of such calls: the first rank of the group tells the others."""
        ranks, group = call.placed.subgroups, call.placed.group

        def outline(tensor: torch.Tensor) -> torch.Tensor:
            shape, count = tuple(tensor.shape), call.samples // group.replicas
            if group.replicas > 1 and shape[:1] != (count,):
                raise DeploymentError(
                    f"module {group.module!r} returned a tensor of shape {shape} for {count} samples: expected {count} "
                    "as its first size; move the module to one device"
                )
            shape = (call.samples, *shape[1:]) if group.replicas > 1 else shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        ranks.failures.wait(dist.barrier(ranks.everyone, async_op=True))
        outputs = tell(lambda: map_tensors(outline, made), ranks.everyone, source=group.first)
        self._outputs[call.key] = outputs
        if not any(each.requires_grad for each in leaves_of(outputs, torch.Tensor)):
            self._used.add(call.key)

    def _compute(self, calls: Sequence[_Call]) -> dict[_Call, Any]:
        """Return what modules make of this rank's samples; several are computed by one graph."""
        placed, states = tuple(call.placed for call in calls), [call.parameters for call in calls]
        inputs = [map_samples(call.placed.part, call.inputs, call.samples) for call in calls]
        self._is_computing = True
        try:
            if len(calls) > 1:
                found = self._compile(placed)(states, inputs)
            else:
                own = zip(placed, states, inputs, strict=True)
                found = [each.compute(state, *args, **kwargs) for each, state, (args, kwargs) in own]
        finally:
            self._is_computing = False
        return dict(zip(calls, found, strict=True))


class _Together(nn.Module):
    """Modules that are computed by one graph."""

    def __init__(self, placed: Sequence[DividedModule]) -> None:
        super().__init__()
        names = (f"{each.group.module.replace('.', '_')}_{number}" for number, each in enumerate(placed))
        self.parts = nn.ModuleDict(dict(zip(names, (each.module for each in placed), strict=True)))

    def forward(self, states: Sequence[dict[str, torch.Tensor]], inputs: Sequence[tuple[Any, dict[str, Any]]]) -> Any:
        """Return the outputs by module; a state replaces a module's parameters."""
        calls = zip(self.parts.values(), states, inputs, strict=True)
        return [torch.func.functional_call(module, state, *own) for module, state, own in calls]


class _Node(torch.autograd.Function):
    """Calls: all ranks have their outputs and the gradients of their inputs, each computes those of its samples."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[_Leaf], sent: Sequence[Any], used: set[Any], begin: Any, *_: Any) -> Any:
        """Return tensors for the whole outputs, with this rank's values in place; sent are calls, outputs, values."""
        ctx.used, ctx.leaves = used, [(placed, samples) for placed, samples, _, _ in leaves]
        ctx.sent = [(call.placed, call.key, output.requires_grad) for call, output, _ in sent]
        ctx.copies = [(tensor, copy) for _, samples, tensor, copy in leaves if samples is None]
        ctx.inner = [copy for *_, copy in leaves], [value for *_, value in sent]
        ctx.save_for_backward(begin)  # for torch's error when it is freed; hooks may pack and copy what is saved
        ctx.set_materialize_grads(False)  # parameters behind unused outputs have no gradient
        found = [torch.empty(output.shape, dtype=output.dtype, device=begin.device) for _, output, _ in sent]
        for whole, (call, _, value) in zip(found, sent, strict=True):
            if value is not None:
                call.placed.part(whole).copy_(value)
        ctx.mark_non_differentiable(*(whole for whole, own in zip(found, ctx.sent, strict=True) if not own[-1]))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Return the gradients of inputs and parameters, after the backward of this rank's samples."""
        _ = ctx.saved_tensors  # an error if the graph was freed; a checkpoint computes again here, on all ranks
        inner, values = ctx.inner
        own, unused = list[tuple[torch.Tensor, torch.Tensor]](), set[Any]()
        for value, grad, (placed, key, requires_grad) in zip(values, grads, ctx.sent, strict=True):
            if grad is None and requires_grad:
                unused.add(key)
            elif grad is not None and value is not None:
                own.append((value, placed.part(grad)))
        ctx.used |= {key for _, key, _ in ctx.sent} - unused
        failures = ctx.sent[0][0].subgroups.failures
        with failures.telling({placed.group.module: None for placed, *_ in ctx.sent}):
            run_nested(ctx, own, inner, ctx.copies)
        if not keeps_graph():
            del ctx.inner
        found, works, sums = dict[int, Any](), list[Any](), defaultdict[Any, list[int]](list)
        for number, (leaf, (placed, samples)) in enumerate(zip(inner, ctx.leaves, strict=True)):
            grad, leaf.grad = leaf.grad, None
            if samples is not None:
                grad = torch.zeros_like(leaf, device=placed.device) if grad is None else grad.contiguous()
                works += placed.share(grad, is_divided=grad.shape[:1] == (samples,))
            elif placed.peers is not None:
                sums[placed.peers, leaf.dtype].append(number)
            found[number] = grad
        for (peers, _), same in sums.items():
            totals = sum_gradients([found[each] for each in same], [inner[each] for each in same], peers, failures.wait)
            found.update(zip(same, totals, strict=True))
        for work in works:
            failures.wait(work)
        return None, None, None, None, *found.values()


def apply_deployment(
    deployment: Deployment, model: nn.Module, everyone: dist.ProcessGroup, options: Mapping[str, Any]
) -> nn.Module:
    """Do on the ranks of a group what `DeploymentPlan.apply` says."""
    if (size := dist.get_world_size(everyone)) != deployment.cluster.devices:
        raise DeploymentError(
            f"the plan is for {deployment.cluster.devices} devices, and there are {size} ranks; plan again with deploy"
        )
    if model in placed_modules:
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
    subgroups = Subgroups(everyone, next((each.device for each in model.state_dict().values()), torch.device("cpu")))
    calls = HeldCalls(options if any(group.units < deployment.cluster.units for group in groups) else None)
    model.forward = functools.update_wrapper(functools.partial(calls.forward, model.forward), model.forward)
    placed_modules[model] = [DividedModule(modules[own.module], own, pairs_of[own.module], subgroups) for own in groups]
    for placed in placed_modules[model]:
        if not placed.is_member:
            placed.module.to_empty(device="meta")
        placed.module.forward = functools.partial(calls.call, placed, placed.module.forward)
    return model
