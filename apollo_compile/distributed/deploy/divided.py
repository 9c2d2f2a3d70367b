"""A module on one of the ranks that divide its samples, its linear layers (by DTensor) or its state (by FSDP2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from apollo_compile.distributed.deploy.pairs import random_states
from apollo_compile.distributed.link import Failures
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import DeviceGroup, LinearPair
from apollo_compile.torch_bridge.nested_graph import call_with_copies
from apollo_compile.torch_bridge.trees import map_tensors


class Subgroups:
    """Process groups of some ranks of a group, the device of this rank, and failures of modules."""

    def __init__(self, everyone: dist.ProcessGroup, device: torch.device) -> None:
        self.everyone, self.rank, self.size = everyone, dist.get_rank(everyone), dist.get_world_size(everyone)
        self.device = device
        self.failures = Failures(everyone, device)
        self._ranks, self._made = dist.get_process_group_ranks(everyone), dict[range, dist.ProcessGroup]()

    def of(self, group: DeviceGroup) -> list[dist.ProcessGroup | None]:
        """Return groups of this rank's replica, and of the ranks with the same part of every replica.

        A group is None if it would have no other rank. All ranks call it, also those outside of the device group.
        """
        ranks, step, found = group.range, group.tensor, list[dist.ProcessGroup | None]()
        for lines in ([range(head, head + step) for head in ranks[::step]], [ranks[own::step] for own in range(step)]):
            for line in (each for each in lines if len(each) > 1 and each not in self._made):
                self._made[line] = dist.new_group([self._ranks[each] for each in line])
            found.append(next((self._made.get(line) for line in lines if self.rank in line), None))
        return found


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of all devices."""
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    if group is None or dist.get_world_size(group) < dist.get_world_size():  # other meshes would use the same names
        raise DeploymentError(
            "expected a process group of all ranks: call torch.distributed.init_process_group, pass a mesh of all, "
            "or mesh=<number> to simulate"
        )
    return group


def part_of(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return the samples of one of several replicas; one replica may have a tensor without samples."""
    return whole if count == 1 else whole[len(whole) * index // count : len(whole) * (index + 1) // count]


def map_samples(function: Callable[[torch.Tensor], torch.Tensor], tree: Any, samples: int) -> Any:
    """Return a tree with the results of a function for all tensors that have so many samples."""
    return map_tensors(lambda each: function(each) if each.shape[:1] == (samples,) else each, tree)


class DividedModule:
    """A module on this rank, which computes its part of what a group of ranks does."""

    def __init__(
        self, module: nn.Module, group: DeviceGroup, pairs: Sequence[LinearPair], subgroups: Subgroups
    ) -> None:
        self.module, self.group, self.subgroups = module, group, subgroups
        self.is_member, self.device = subgroups.rank in group.range, subgroups.device
        self.heads = group.range[:: group.tensor]
        """First ranks of the replicas."""
        replica, self.peers = subgroups.of(group)
        self._call: nn.Module = module
        if replica is not None:
            able = [pair for pair in pairs if pair.degree >= group.tensor]
            styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for pair in able for name in pair.columns}
            styles |= {pair.row: RowwiseParallel() for pair in able}
            mesh = DeviceMesh.from_group(replica, self.device.type)
            parallelize_module(module, mesh, styles, src_data_rank=None)
        elif group.is_sharded and self.peers is not None:
            mesh = DeviceMesh.from_group(self.peers, self.device.type)
            self._call = _Whole(module)  # so that gathering is inside of the module's calls
            for unit in (*units_of(module), self._call):
                sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
                sharded.set_gradient_divide_factor(1.0)  # a sum, as of replicas
                sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def compute(self, parameters: dict[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the module with some parameters in place of its own.

        Raises:
            DeploymentError: ranks of a replica would draw different random numbers.
        """
        before = random_states(self.device) if self.group.tensor > 1 else []
        found = call_with_copies(self._call, parameters, args, kwargs)
        if before and not all(map(torch.equal, before, random_states(self.device))):
            raise DeploymentError(
                f"module {self.group.module!r} draws random numbers, which would differ among {self.group.tensor} "
                "devices per replica: plan again with the model in the mode in which it trains, or move the module"
            )
        # The last layer may have left the sum of its parts under way: a copy of that waits.
        return map_tensors(lambda each: each if type(each) is torch.Tensor else each.clone(), found)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's samples."""
        return part_of(whole, (self.subgroups.rank - self.group.first) // self.group.tensor, len(self.heads))

    def share(self, whole: torch.Tensor, *, is_divided: bool = True) -> list[Any]:
        """Begin to send each replica's samples of a contiguous tensor to all ranks, or else the sum over replicas."""
        group, count = self.subgroups.everyone, len(self.heads)
        if is_divided or count == 1:
            parts = [(head, part_of(whole, index, count)) for index, head in enumerate(self.heads)]
            return [dist.broadcast(part, group=group, group_src=head, async_op=True) for head, part in parts]
        if self.subgroups.rank not in self.heads:
            whole.zero_()
        return [dist.all_reduce(whole, group=group, async_op=True)]


placed_modules: weakref.WeakKeyDictionary[nn.Module, list[DividedModule]] = weakref.WeakKeyDictionary()
"""Modules that run on groups, by model."""


class _Whole(nn.Sequential):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self[0](*args, **kwargs)


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters are gathered one after the other; the rest of a module is one more unit."""
    found: list[nn.Module] = []
    for each in module.children():  # a list of layers is not called, but they are
        is_layer = isinstance(module, nn.Sequential | nn.ModuleList) and not isinstance(each, nn.ModuleList)
        found += ([each] if any(True for _ in each.parameters()) else []) if is_layer else units_of(each)
    return found
