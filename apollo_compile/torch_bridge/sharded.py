"""A model whose parameters FSDP2 has sharded, for steps that gather them and scatter gradients themselves.

reason_for_hooks(model)                 why a step has to leave that to the hooks of `fully_shard`; None if it need not
ShardedModel(model)                     whole parameters in the place of shards, and the two collectives
OptimizerOfShards(optimizer, sharded)   an `OptimizerInParts` that takes whole parameters, and steps their shards

Note [whole parameters]
    Hooks of `fully_shard` end Dynamo's graph, and a program calls no autograd. So while a step is taken, modules have
    whole parameters in the place of their shards, and no hooks. Dynamo traces them, its guards find the same objects in
    every step, and gradients are theirs. They have memory only while a loop runs: a program gathers tensors of its own
    and releases them after their last use. Between steps the model is what `fully_shard` made of it.

Shards are the local tensors of DTensors: equal chunks along one dimension, of which the last ones may be short or
empty. In collectives all have the same size, so short ones are filled up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from apollo_compile.errors import TargetError
from apollo_compile.torch_bridge.optimizers import OptimizerInParts

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names of torch 2.13, which deprecates the others."""


def reason_for_hooks(model: nn.Module) -> str | None:
    """Return why only hooks of FSDP2 can gather parameters of a model; None if all are in chunks on one mesh."""
    if not all(hasattr(module._get_fsdp_state(), "_fsdp_param_groups") for module in _modules_of(model)):
        return "FSDP2 of this torch has groups of another kind; expected torch 2.13 or later"
    parameters, groups = list(model.parameters()), _groups_of(model)
    meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
    reasons = {
        "parameters that it ignores": not all(isinstance(each, DTensor) for each in parameters),
        "a mesh of several dimensions": any(mesh.ndim > 1 for mesh in meshes),
        "several process groups": len({id(getattr(each.mesh_info, "shard_process_group", None)) for each in groups})
        > 1,
        "parameters on a GPU": any(mesh.device_type != "cpu" for mesh in meshes),
        "parameters that are not in chunks": not all(
            type(placement) is Shard
            for each in parameters
            if isinstance(each, DTensor)
            for placement in each.placements
        ),
        "a mixed precision policy": any(_has_dtypes(group.mp_policy) for group in groups),
        "an offload policy": any(type(group.offload_policy) is not OffloadPolicy for group in groups),
        "a divisor of its own for gradients": any(group.gradient_divide_factor is not None for group in groups),
        "several modules in one group": any(len(group.modules) > 1 for group in groups),
        "sparse gradients": any(getattr(module, "sparse", False) for module in model.modules()),
    }
    found = next((name for name, is_so in reasons.items() if is_so), None)
    return None if found is None else f"FSDP2 has {found}"


def _has_dtypes(policy: MixedPrecisionPolicy) -> bool:
    return any(each is not None for each in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype))


def _modules_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups_of(model: nn.Module) -> list[Any]:
    return [group for module in _modules_of(model) for group in module._get_fsdp_state()._fsdp_param_groups]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How a parameter is cut."""

    dim: int
    size: int
    """Size of the whole parameter along `dim`."""
    shape: tuple[int, ...]
    """Shape of a chunk that is filled up."""


class ShardedModel:
    """Whole parameters in the place of shards; see Note [whole parameters].

    Arguments:
        model: of those that `reason_for_hooks` has nothing against.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = _modules_of(model)
        for module in self._modules:
            module.reshard()
        shards = [each for each in model.parameters() if isinstance(each, DTensor)]
        self._groups = _groups_of(model)
        # Not that of the mesh of a DTensor, which may be an equal mesh over other groups.
        self.group: dist.ProcessGroup = self._groups[0].mesh_info.shard_process_group
        self.parameters: Sequence[nn.Parameter] = [_empty_like(each) for each in shards]
        """Whole parameters."""
        self._shard_of = {id(whole): shard for whole, shard in zip(self.parameters, shards, strict=True)}
        self._whole_of = {id(shard): whole for whole, shard in zip(self.parameters, shards, strict=True)}
        self.bucket_bytes_cap = max(
            sum(p._orig_size.numel() * p.sharded_param.element_size() for p in g.fsdp_params) for g in self._groups
        )
        """Most bytes at which a bucket is full: those of the largest module that `fully_shard` was called on."""
        self._chunks = {id(whole): self._cut(shard) for whole, shard in zip(self.parameters, shards, strict=True)}

    def _cut(self, shard: DTensor) -> _Chunks:
        (placement,) = shard.placements
        assert isinstance(placement, Shard)
        dim, size = placement.dim, shard.shape[placement.dim]
        rows = -(-size // self.group.size())
        return _Chunks(dim, size, (*shard.shape[:dim], rows, *shard.shape[dim + 1 :]))

    def is_syncing(self) -> bool:
        """Return whether backwards average gradients: not after `set_requires_gradient_sync(False)`."""
        return all(group.reduce_grads for group in self._groups)

    def broadcast_buffers(self) -> None:
        """Do nothing: buffers of ranks are their own."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let modules have whole parameters, without memory, and no hooks of FSDP in a `with`.

        Gradients of whole parameters stay, unless what is in the `with` fails.

        Raises:
            TargetError: a parameter was replaced.
        """
        changes = self._changes()
        before = [(mapping, key, mapping[key]) for mapping, key, _ in changes]
        try:
            for mapping, key, value in changes:
                mapping[key] = value
            yield
        except BaseException:
            for whole in self.parameters:
                whole.grad = None
            raise
        finally:
            for mapping, key, value in before:
                mapping[key] = value
            for whole in self.parameters:
                whole.untyped_storage().resize_(0)

    def _changes(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return what a step needs of modules: dictionary, key, and value."""
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for module in self._modules:
            module.reshard()  # a forward without a backward leaves whole ones of its own
            state = module._get_fsdp_state()
            own = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = module.__dict__[name]
                changes.append((module.__dict__, name, type(hooks)((k, v) for k, v in hooks.items() if k not in own)))
        for module in self.model.modules():
            if "_is_fsdp_managed_module" in module.__dict__:  # Dynamo has fewer guards for these
                changes.append((module.__dict__, "_is_fsdp_managed_module", False))
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in self._whole_of:
                    raise TargetError(
                        f"the parameter {name} of a {type(module).__name__} was replaced; call compile_step again"
                    )
                whole = self._whole_of[id(parameter)].requires_grad_(parameter.requires_grad)
                changes.append((module._parameters, name, whole))
        return changes

    def fill(self, bucket: Sequence[torch.Tensor]) -> None:
        """Gather whole parameters into their memory, which is allocated; a collective."""
        gathered = self.gather(bucket, [self.local_of(whole) for whole in bucket])
        with torch.no_grad():
            for whole, tensor in zip(bucket, gathered, strict=True):
                whole.untyped_storage().resize_(whole.nbytes)
                whole.copy_(tensor)

    def gather(self, bucket: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors with the values of whole parameters, made of all ranks' shards; a collective."""
        chunks = [self._chunks[id(whole)] for whole in bucket]
        padded = [_fill_up(shard, each.dim, each.shape[each.dim]) for shard, each in zip(shards, chunks, strict=True)]
        sent = torch.cat([each.reshape(-1) for each in padded])
        received = sent.new_empty(self.group.size() * sent.numel())
        all_gather(received, sent, group=self.group)
        pieces = torch.split(received.view(self.group.size(), -1), [each.numel() for each in padded], dim=1)
        return [
            torch.cat([row.view(each.shape) for row in piece.unbind()], each.dim).narrow(each.dim, 0, each.size)
            for piece, each in zip(pieces, chunks, strict=True)
        ]

    def scatter(self, bucket: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the means of gradients of whole parameters; a collective."""
        count, rows = self.group.size(), []
        for whole, gradient in zip(bucket, gradients, strict=True):
            each = self._chunks[id(whole)]
            padded = _fill_up(gradient, each.dim, count * each.shape[each.dim])
            rows.append(torch.stack(padded.chunk(count, each.dim)).view(count, -1))
        sent = torch.cat(rows, dim=1).div_(count)
        received = sent.new_empty(sent.shape[1])
        reduce_scatter(received, sent.view(-1), group=self.group)
        pieces = torch.split(received, [row.shape[1] for row in rows])
        made = []
        for whole, piece in zip(bucket, pieces, strict=True):
            each = self._chunks[id(whole)]
            made.append(piece.view(each.shape).narrow(each.dim, 0, self.local_of(whole).shape[each.dim]))
        return made

    def probe(self, gradient: torch.Tensor) -> None:
        """Scatter a tensor that all ranks can divide; a collective."""
        reduce_scatter(gradient.new_empty(gradient.numel() // self.group.size()), gradient, group=self.group)

    def owner_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter of a whole one; another tensor itself."""
        return self._shard_of.get(id(tensor), tensor)

    def shard_bytes(self, tensor: torch.Tensor) -> int:
        """Return the size of a rank's part of a whole parameter, as it is sent; 0 for another tensor."""
        chunks = self._chunks.get(id(tensor))
        return 0 if chunks is None else math.prod(chunks.shape) * tensor.element_size()

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter; another tensor itself."""
        shard = self._shard_of.get(id(tensor))
        return tensor if shard is None else shard._local_tensor

    def sharded_like(self, whole: torch.Tensor, shard: torch.Tensor) -> DTensor:
        """Return this rank's part of a gradient as that of a sharded parameter."""
        owner = self._shard_of[id(whole)]
        return DTensor.from_local(
            shard, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
        )

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients of parameters that have some."""
        gradients = (self.owner_of(each).grad for each in parameters)
        return [each._local_tensor for each in gradients if isinstance(each, DTensor)]

    def optimizer_in_parts(self, optimizer: torch.optim.Optimizer) -> OptimizerInParts:
        """Return the optimizer for the shards of some whole parameters at a time."""
        return OptimizerOfShards(optimizer, self)

    @torch.no_grad()
    def leave(self, bucket: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Leave gradients in `.grad` of sharded parameters, added to what is there, and call hooks, as FSDP2 does."""
        for whole, shard in zip(bucket, shards, strict=True):
            owner, gradient = self._shard_of[id(whole)], self.sharded_like(whole, shard)
            owner.grad = gradient if owner.grad is None else owner.grad + gradient
            for hook in (owner._post_accumulate_grad_hooks or {}).values():
                hook(owner)


class OptimizerOfShards(OptimizerInParts):
    """Steps an optimizer of sharded parameters, some of them at a time.

    Arguments:
        optimizer: the user's.
        sharded: the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
        self._sharded = sharded
        super().__init__(optimizer)

    def refresh(self) -> None:
        """Look at the groups of parameters; whole ones count as their shards."""
        super().refresh()
        for whole in self._sharded.parameters:
            if (group := self._group_of.get(id(self._sharded.owner_of(whole)))) is not None:
                self._group_of[id(whole)] = group

    def step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update the shards of these whole parameters, with this rank's parts of gradients."""
        self.updated += parameters
        owners = [self._sharded.owner_of(whole) for whole in parameters]
        pairs = zip(parameters, gradients, strict=True)
        super().step(owners, [self._sharded.sharded_like(whole, gradient) for whole, gradient in pairs])

    def _reason_against_fused(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> str | None:
        if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return "DTensors have none"
        return super()._reason_against_fused(group, parameters)

    def is_at(self, parameter: torch.Tensor, taken: torch.Tensor) -> bool:
        """Return whether a tensor is the shard of a whole parameter."""
        return super().is_at(self._sharded.local_of(parameter), taken)


def _empty_like(shard: DTensor) -> nn.Parameter:
    """Return a whole parameter without memory."""
    whole = nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device=shard.device), shard.requires_grad)
    whole.untyped_storage().resize_(0)
    return whole


def _fill_up(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a tensor with zeros at the end of a dimension."""
    missing = size - tensor.shape[dim]
    return tensor if not missing else nn.functional.pad(tensor, [*(0, 0) * (tensor.dim() - 1 - dim), 0, missing])
