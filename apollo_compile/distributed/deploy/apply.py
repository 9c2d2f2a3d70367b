"""Run a model as a deployment says: `DeploymentPlan.apply`.

    apply_deployment(deployment, model, group) -> model;  full_state_dict(model) -> state on every rank

Every rank runs the model's own code with the whole batch. A module with a group is computed by the ranks of its group
only, each with its share of the samples; then every rank has the whole output, so that the code between modules and the
loss, which all ranks run alike, need not be changed. In the backward, a rank takes its share of the gradient of the
output, gradients of parameters are summed over the group, and gradients of inputs go to every rank. So losses and
gradients are those of one process.

Note [Order of transfers]
    Transfers are collectives of all ranks. They begin in the order of the model's code, and in the backward in reverse
    (autograd runs the node that was made last first), so that they have one order on all ranks. A rank goes on while
    outputs of other ranks are under way: an output is a tensor that waits when it is used first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import REST, Deployment
from apollo_compile.torch_bridge.trees import flatten, map_tensors


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of an output, as all ranks have to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Arriving(torch.Tensor):
    """A tensor that may be under way; the first function that reads it waits for it."""

    plain: torch.Tensor
    waits: list[Callable[[], Any]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on the tensors that have arrived."""
        return func(*arrived(args), **arrived(kwargs or {}))


def arriving(plain: torch.Tensor, waits: list[Callable[[], Any]]) -> torch.Tensor:
    """Return a tensor that becomes `plain` when it is used, after some calls."""
    found = plain.detach().as_subclass(Arriving)
    found.plain, found.waits = plain, waits
    return found


def arrived(tree: Any) -> Any:
    """Return a tree with plain tensors, after waiting for those under way."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Arriving):
            return tensor
        while tensor.waits:
            tensor.waits.pop()()
        return tensor.plain

    return map_tensors(wait, tree)


@dataclass(eq=False)
class _Placed:
    """A module that a group of ranks computes."""

    name: str
    module: nn.Module
    ranks: range
    """Ranks of its group."""
    everyone: dist.ProcessGroup
    group: dist.ProcessGroup | None
    """Its group, if there are several ranks in it and this is one of them."""
    rank: int
    device: torch.device
    is_inside: bool = False
    known: dict[Any, Any] = field(default_factory=dict)
    """Outputs by inputs, with `_Leaf` in place of tensors."""

    def __post_init__(self) -> None:
        """Remember the module's own forward."""
        self.original = self.module.forward

    @property
    def is_member(self) -> bool:
        """Whether this rank computes it."""
        return self.rank in self.ranks

    def part(self, whole: Any, rank: int) -> Any:
        """Return the samples of a rank of the group."""
        if len(self.ranks) == 1:
            return whole
        index, count, samples = rank - self.ranks.start, len(self.ranks), len(whole)
        return whole[samples * index // count : samples * (index + 1) // count]

    def share(self, whole: torch.Tensor) -> list[dist.Work]:
        """Begin to send the parts of a contiguous tensor to all ranks."""
        parts = [(rank, self.part(whole, rank)) for rank in self.ranks]
        return [_broadcast(part, self.everyone, rank) for rank, part in parts]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or receive its output."""
        if self.is_inside:
            return self.original(*args, **kwargs)
        leaves, structure, build = flatten((arrived(args), arrived(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        samples = next((each.shape[0] for each in tensors if each.dim()), 0)
        if samples < len(self.ranks):
            raise DeploymentError(
                f"module {self.name!r} got {samples} samples for {len(self.ranks)} devices; expected at least one per "
                "device: give larger batches, or move the module to fewer devices"
            )
        has_gradients = torch.is_grad_enabled()
        token = torch.zeros((), device=tensors[0].device, requires_grad=has_gradients)
        moving = [
            index
            for index, leaf in enumerate(leaves)
            if has_gradients and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        token, *entered = _Enter.apply(self, samples, token, *(leaves[index] for index in moving))  # type: ignore[no-untyped-call]
        for index, value in zip(moving, entered, strict=True):
            leaves[index] = value
        made: Any = None
        if self.is_member:
            own_args, own_kwargs = build(
                [
                    self.part(leaf, self.rank)
                    if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (samples,)
                    else leaf
                    for leaf in leaves
                ]
            )
            made = self._compute(own_args, own_kwargs)
        key = (structure, tuple((tuple(t.shape), t.dtype) for t in tensors), has_gradients, len(moving))
        specs, _, rebuild = flatten(self._describe(key, made, samples))
        sent = [index for index, spec in enumerate(specs) if isinstance(spec, _Leaf)]
        values = flatten(made)[0] if self.is_member else [None] * len(specs)
        works: list[list[dist.Work]] = []
        results = _Leave.apply(  # type: ignore[no-untyped-call]
            self, [specs[index] for index in sent], works, token, *(values[index] for index in sent)
        )
        for index, result, pending in zip(sent, results, works, strict=True):
            specs[index] = arriving(result, [work.wait for work in pending])
        return rebuild(specs)

    def _compute(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the module; the backward sums gradients over the group."""
        self.is_inside = True
        try:
            names = [name for name, each in self.module.named_parameters() if each.requires_grad]
            if self.group is None or not names or not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
            own = [self.module.get_parameter(name) for name in names]
            summed = _SumGradients.apply(self.group, *own)  # type: ignore[no-untyped-call]
            return torch.func.functional_call(self.module, dict(zip(names, summed, strict=True)), tuple(args), kwargs)
        finally:
            self.is_inside = False

    def _describe(self, key: Any, made: Any, samples: int) -> Any:
        """Return the output with `_Leaf` in place of tensors; the first rank of the group tells the others, once."""
        if key not in self.known:
            first, is_divided = self.ranks.start, len(self.ranks) > 1
            count = len(self.part(range(samples), first))

            def describe(tensor: torch.Tensor) -> _Leaf:
                shape = tuple(tensor.shape)
                if is_divided and shape[:1] != (count,):
                    raise DeploymentError(
                        f"module {self.name!r} returned a tensor of shape {shape} for {count} samples, so its "
                        "samples cannot be divided over devices; move it to one device"
                    )
                return _Leaf((samples, *shape[1:]) if is_divided else shape, tensor.dtype, tensor.requires_grad)

            told = [map_tensors(describe, made) if self.rank == first else None]
            dist.broadcast_object_list(told, group=self.everyone, group_src=first)
            self.known[key] = told[0]
        return self.known[key]


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
            if len(placed.ranks) == 1 or shape[:1] == (ctx.samples,):
                works += placed.share(whole)
            else:  # every rank of the group has a part of the sum
                if placed.is_member:
                    dist.all_reduce(whole, group=placed.group)
                works.append(_broadcast(whole, placed.everyone, placed.ranks.start))
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
                placed.part(whole, placed.rank).copy_(value)
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
        own = [placed.part(grad, placed.rank) if placed.is_member and grad is not None else None for grad in grads]
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


def apply_deployment(deployment: Deployment, model: nn.Module, everyone: dist.ProcessGroup) -> nn.Module:
    """Let the modules of a model run on their groups, and return the model; all ranks call it.

    On ranks that do not compute a module, its parameters move to the device "meta" and take no memory.

    Raises:
        DeploymentError: the plan is for another number of devices or another model.
    """
    size, rank = dist.get_world_size(everyone), dist.get_rank(everyone)
    if size != deployment.cluster.devices:
        raise DeploymentError(
            f"the plan is for {deployment.cluster.devices} devices, and there are {size} ranks; plan again with deploy"
        )
    if model in _placed:
        raise DeploymentError("a plan has been applied to this model; build the model again to apply another")
    groups = [group for group in deployment.groups if group.module != REST]
    modules = dict(model.named_modules())
    if unknown := [group.module for group in groups if group.module not in modules]:
        raise DeploymentError(f"the plan is for another model: there is no module {unknown[0]!r}")
    all_ranks = dist.get_process_group_ranks(everyone)
    made: dict[range, dist.ProcessGroup | None] = {}
    for group in groups:
        module, ranks = modules[group.module], group.range
        if ranks not in made:  # in one order on all ranks
            made[ranks] = dist.new_group([all_ranks[each] for each in ranks]) if len(ranks) > 1 else None
        placed = _Placed(
            name=group.module,
            module=module,
            ranks=ranks,
            everyone=everyone,
            group=made[ranks] if rank in ranks else None,
            rank=rank,
            device=next((each.device for each in module.state_dict().values()), torch.device("cpu")),
        )
        if not placed.is_member:
            module.to_empty(device="meta")
        module.forward = placed.run
        _placed.setdefault(model, []).append(placed)
    return model


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of all modules of a model with a plan, on every rank; all ranks call it."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for placed in _placed.get(model, ()):
        for name in (f"{placed.name}.{own}" for own in placed.module.state_dict()):
            if state[name].is_meta:
                state[name] = torch.empty_like(state[name], device=placed.device)
            state[name] = state[name].contiguous()
            _broadcast(state[name], placed.everyone, placed.ranks.start).wait()
    return state
