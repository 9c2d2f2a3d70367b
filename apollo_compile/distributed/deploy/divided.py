"""A module on one of the ranks that divide its samples, its linear layers or its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from apollo_compile.distributed.deploy.pairs import random_states
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import DeviceGroup, LinearPair
from apollo_compile.torch_bridge.trees import map_tensors


class Subgroups:
    """Process groups of some ranks of a group, and the device of this rank."""

    def __init__(self, everyone: dist.ProcessGroup, device: torch.device) -> None:
        self.everyone, self.rank, self.size = everyone, dist.get_rank(everyone), dist.get_world_size(everyone)
        self.device = device
        self._ranks, self._made = dist.get_process_group_ranks(everyone), dict[range, dist.ProcessGroup]()

    def of(self, lines: Sequence[range]) -> dist.ProcessGroup | None:
        """Return the group of the line that has this rank; None if that is no other rank. All ranks call it alike."""
        for line in lines:
            if len(line) > 1 and line not in self._made:
                self._made[line] = dist.new_group([self._ranks[each] for each in line])
        return next((self._made[line] for line in lines if self.rank in line and len(line) > 1), None)


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of all devices."""
    if mesh is not None and mesh.ndim != 1:
        raise DeploymentError(f"the mesh has {mesh.ndim} dimensions: expected one")
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    if group is None:
        raise DeploymentError(
            "there is no process group: call torch.distributed.init_process_group, as under torchrun, or pass "
            "mesh=<number of devices> to simulate"
        )
    return group


class DividedModule:
    """A module on this rank, which computes its part of what a group of ranks does."""

    def __init__(
        self, module: nn.Module, group: DeviceGroup, pairs: Sequence[LinearPair], subgroups: Subgroups
    ) -> None:
        self.module, self.group, self.subgroups = module, group, subgroups
        ranks, step = group.range, group.tensor
        self.is_member = subgroups.rank in ranks
        self.device = subgroups.device
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

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the backward sums gradients over the replicas.

        Raises:
            DeploymentError: ranks of a replica would draw different random numbers.
        """
        before = random_states(self.device) if self.group.tensor > 1 else []
        own = self.summed()
        found = torch.func.functional_call(self._call, own, args, kwargs) if own else self._call(*args, **kwargs)
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


class _SumGradients(torch.autograd.Function):
    """Parameters whose gradients are summed over a group."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parameters: torch.Tensor) -> Any:
        """Return the parameters."""
        ctx.group = group
        ctx.set_materialize_grads(False)  # parameters behind unused outputs have no gradient
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Return the sums."""
        found = list(grads)
        there = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        for dtype in dict.fromkeys(grad.dtype for _, grad in there):
            members = [(index, grad) for index, grad in there if grad.dtype == dtype]
            flat = torch.cat([grad.reshape(-1) for _, grad in members])
            dist.all_reduce(flat, group=ctx.group)
            parts = torch.split(flat, [grad.numel() for _, grad in members])
            for (index, grad), part in zip(members, parts, strict=True):
                found[index] = part.view_as(grad)
        return None, *found
