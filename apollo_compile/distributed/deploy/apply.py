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
from apollo_compile.passes.deploy import Deployment, Group
from apollo_compile.torch_bridge.trees import flatten, map_tensors


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of an output, as all ranks have to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Arriving(torch.Tensor):
    """A tensor that may be under way; the first function that reads it waits for it."""

    plain: torch.Tensor
    works: list[dist.Work]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on the tensors that have arrived."""
        return func(*_arrived(args), **_arrived(kwargs or {}))


def _arrived(tree: Any) -> Any:
    """Return a tree with plain tensors, after waiting for those under way."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, _Arriving):
            return tensor
        while tensor.works:
            tensor.works.pop().wait()
        return tensor.plain

    return map_tensors(wait, tree)


def _under_way(plain: torch.Tensor, works: list[dist.Work]) -> torch.Tensor:
    """Return a tensor that becomes `plain` when it is used."""
    arriving = plain.detach().as_subclass(_Arriving)
    arriving.plain, arriving.works = plain, works
    return arriving


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
    outputs: frozenset[int]
    """Places of the output's tensors that are used."""
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

    def bounds(self, samples: int, rank: int) -> tuple[int, int]:
        """Return the samples of a rank of the group: first, and one after the last."""
        index, count = rank - self.ranks.start, len(self.ranks)
        return samples * index // count, samples * (index + 1) // count

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or receive its output."""
        if self.is_inside:
            return self.original(*args, **kwargs)
        leaves, structure, build = flatten((_arrived(args), _arrived(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        samples = next((each.shape[0] for each in tensors if each.dim()), 0)
        if samples < len(self.ranks):
            raise DeploymentError(
                f"module {self.name!r} got {samples} samples for {len(self.ranks)} devices; expected at least one per "
                "device: give larger batches, or move the module to fewer devices"
            )
        token = torch.zeros((), device=tensors[0].device, requires_grad=torch.is_grad_enabled())
        moving = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and moving:
            token, *entered = _Enter.apply(self, samples, *(leaves[index] for index in moving))  # type: ignore[no-untyped-call]
            for index, value in zip(moving, entered, strict=True):
                leaves[index] = value
        key = (structure, tuple((tuple(t.shape), t.dtype) for t in tensors), token.requires_grad, len(moving))
        made: Any = None
        if self.is_member:
            own_args, own_kwargs = build([self._share_of(leaf, samples) for leaf in leaves])
            made = self._compute(own_args, own_kwargs)
        known = self._describe(key, made, samples)
        specs, _, rebuild = flatten(known)
        tensors_at = [index for index, spec in enumerate(specs) if isinstance(spec, _Leaf)]
        sent = [index for place, index in enumerate(tensors_at) if place in self.outputs]
        values, _, _ = flatten(made) if self.is_member else ([None] * len(specs), "", None)
        works: list[list[dist.Work]] = []
        results = (
            _Leave.apply(  # type: ignore[no-untyped-call]
                self, samples, [specs[index] for index in sent], works, token, *(values[index] for index in sent)
            )
            if sent
            else ()
        )
        found = list(specs)
        for place, index in enumerate(tensors_at):
            found[index] = _Missing(self.name, place)
        for index, result, pending in zip(sent, results, works, strict=True):
            found[index] = _under_way(result, pending)
        return rebuild(found)

    def _share_of(self, leaf: Any, samples: int) -> Any:
        """Return this rank's samples of a tensor that has as many as the first input; anything else as it is."""
        is_divided = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples
        if len(self.ranks) == 1 or not is_divided:
            return leaf
        first, end = self.bounds(samples, self.rank)
        return leaf[first:end]

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
            first, end = self.bounds(samples, self.ranks.start)

            def describe(tensor: torch.Tensor) -> _Leaf:
                shape = tuple(tensor.shape)
                if len(self.ranks) > 1 and shape[:1] != (end - first,):
                    raise DeploymentError(
                        f"module {self.name!r} returned a tensor of shape {shape} for {end - first} samples, so its "
                        "samples cannot be divided over devices; move it to one device"
                    )
                shape = (samples, *shape[1:]) if len(self.ranks) > 1 else shape
                return _Leaf(shape, tensor.dtype, tensor.requires_grad)

            told = [map_tensors(describe, made) if self.rank == self.ranks.start else None]
            dist.broadcast_object_list(told, group=self.everyone, group_src=self.ranks.start)
            self.known[key] = told[0]
        return self.known[key]

    def parts(self, whole: torch.Tensor, samples: int) -> list[tuple[int, torch.Tensor]]:
        """Return the part of a tensor that each rank of the group has."""
        if len(self.ranks) == 1:
            return [(self.ranks.start, whole)]
        return [(rank, whole[slice(*self.bounds(samples, rank))]) for rank in self.ranks]

    def share_with_all(self, whole: torch.Tensor, samples: int) -> list[dist.Work]:
        """Begin to send every rank's part of a contiguous tensor to all ranks."""
        works = [
            dist.broadcast(part, group=self.everyone, group_src=rank, async_op=True)
            for rank, part in self.parts(whole, samples)
        ]
        return [work for work in works if work is not None]


class _Missing:
    """An output that no code read when the plan was made."""

    def __init__(self, name: str, index: int) -> None:
        self._apollo_text = f"output {index} of module {name!r} was not used when the plan was made; plan again"

    def __getattr__(self, name: str) -> Any:
        raise DeploymentError(self._apollo_text)


class _Enter(torch.autograd.Function):
    """Inputs with gradients: each rank's gradient of its samples goes to all ranks."""

    @staticmethod
    def forward(ctx: Any, placed: _Placed, samples: int, *inputs: torch.Tensor) -> Any:
        """Return a token and the inputs."""
        ctx.placed, ctx.samples = placed, samples
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in inputs]
        return inputs[0].new_zeros(()), *(each.view_as(each) for each in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor, *grads: torch.Tensor) -> Any:
        """Return the gradients of all samples."""
        placed, found, works = ctx.placed, [], []
        for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=True):
            whole = torch.empty(shape, dtype=dtype, device=device)
            if placed.is_member:
                whole.copy_(grad)
            is_divided = len(placed.ranks) > 1 and len(shape) and shape[0] == ctx.samples
            if is_divided or len(placed.ranks) == 1:
                works += placed.share_with_all(whole, ctx.samples)
            else:  # every rank of the group has a part of the sum
                if placed.is_member:
                    dist.all_reduce(whole, group=placed.group)
                work = dist.broadcast(whole, group=placed.everyone, group_src=placed.ranks.start, async_op=True)
                works += [] if work is None else [work]
            found.append(whole)
        for work in works:
            work.wait()
        return None, None, *found


class _Leave(torch.autograd.Function):
    """Outputs: each rank's samples go to all ranks; the backward takes this rank's samples of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        placed: _Placed,
        samples: int,
        specs: list[_Leaf],
        works: list[list[dist.Work]],
        token: torch.Tensor,
        *values: torch.Tensor | None,
    ) -> Any:
        """Return the whole outputs, which may still be under way."""
        ctx.placed, ctx.samples, ctx.specs = placed, samples, specs
        found = []
        for spec, value in zip(specs, values, strict=True):
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=token.device)
            if value is not None:
                dict(placed.parts(whole, samples))[placed.rank].copy_(value)
            works.append(placed.share_with_all(whole, samples))
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
        if not placed.is_member:
            return None, None, None, None, grads[0].new_zeros(()), *(None for _ in grads)
        own = [
            dict(placed.parts(grad, ctx.samples))[placed.rank] if spec.requires_grad else None
            for grad, spec in zip(grads, ctx.specs, strict=True)
        ]
        return None, None, None, None, grads[0].new_zeros(()), *own


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
        by_type: dict[torch.dtype, list[int]] = {}
        for index, grad in enumerate(grads):
            by_type.setdefault(grad.dtype, []).append(index)
        found = list(grads)
        for members in by_type.values():
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
    groups = [group for group in deployment.groups if _outputs_of(deployment, group)]
    found = []
    modules = dict(model.named_modules())
    if unknown := [group.module for group in groups if group.module not in modules]:
        raise DeploymentError(f"the plan is for another model: there is no module {unknown[0]!r}")
    all_ranks = dist.get_process_group_ranks(everyone)
    made: dict[range, dist.ProcessGroup | None] = {}
    for group in groups:
        ranks = range(group.first, group.first + group.devices)
        if ranks not in made:  # in one order on all ranks
            made[ranks] = dist.new_group([all_ranks[each] for each in ranks]) if len(ranks) > 1 else None
        placed = _Placed(
            name=group.module,
            module=modules[group.module],
            ranks=ranks,
            everyone=everyone,
            group=made[ranks] if rank in ranks else None,
            rank=rank,
            outputs=_outputs_of(deployment, group),
        )
        found.append(placed)
        if not placed.is_member:
            placed.module.to_empty(device="meta")
        placed.module.forward = placed.run
    _placed[model] = found
    return model


def _outputs_of(deployment: Deployment, group: Group) -> frozenset[int]:
    """Return which output tensors of a module are used; none are of the code between the modules."""
    calls = (call for call in deployment.work.calls if call.module == group.module)
    return frozenset(index for call in calls for index in call.outputs)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of all modules of a model with a plan, on every rank; all ranks call it."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for placed in _placed.get(model, ()):
        prefix = next(name for name, module in model.named_modules() if module is placed.module)
        for name in placed.module.state_dict():
            value = state[f"{prefix}.{name}"]
            if value.is_meta:
                value = torch.empty_like(value, device=_device_of(placed))
            dist.broadcast(value.contiguous(), group=placed.everyone, group_src=placed.ranks.start)
            state[f"{prefix}.{name}"] = value
    return state


def _device_of(placed: _Placed) -> torch.device:
    """Return the device of tensors that the group of all ranks sends."""
    is_cpu = dist.get_backend(placed.everyone) == "gloo"
    return torch.device("cpu") if is_cpu else torch.device(torch.accelerator.current_accelerator() or "cpu")
