"""A model that every rank has whole, with gradients of its own, for steps that average these themselves.

reason_against(model)          why a step cannot average the gradients of a module
reason_for_reducer(model)      why a step has to leave gradients to DistributedDataParallel; None if it need not
replicas_of(model)             the ranks of a model in DistributedDataParallel
replicas_on(model, group)      the ranks of a module without a wrapper
is_sharded(model)              whether FSDP2 has its parameters

DistributedDataParallel has a reducer in C++: it waits for hooks of autograd, and sends a bucket when all of its hooks
were called. The program of a step calls no autograd. It sends the buckets itself, as segments. So DDP is left out: the
loss function is called with a view of it whose forward prepares nothing for the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apollo_compile.errors import TargetError

_BROADCAST_BYTES = 250 * 2**20
BUCKET_BYTES = 25 * 2**20
"""Defaults of DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """The ranks that have a model, each whole."""

    model: nn.Module
    """Model that the loss function is called with."""
    group: dist.ProcessGroup
    bucket_bytes_cap: int
    """Most bytes at which a bucket is full."""
    is_syncing: Callable[[], bool]
    """Returns whether backwards average gradients: False inside of `no_sync`."""
    broadcast_buffers: Callable[[], None]
    """Copies the buffers of rank 0 to all ranks, as a forward does first."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the model."""
        return list(self.model.parameters())


def replicas_of(model: DistributedDataParallel) -> Replicas:
    """Return the ranks of a wrapped model."""
    return Replicas(
        model=without_reducer(model),
        group=model.process_group,
        bucket_bytes_cap=model.bucket_bytes_cap,
        is_syncing=lambda: bool(model.require_backward_grad_sync),
        broadcast_buffers=partial(_broadcast_buffers, model),
    )


def replicas_on(model: nn.Module, group: dist.ProcessGroup) -> Replicas:
    """Return the ranks of a module without a wrapper; parameters and buffers of rank 0 are copied to all, as DDP does.

    Raises:
        RuntimeError: parameters have other shapes on other ranks.
    """
    parameters: list[torch.Tensor] = list(model.parameters())
    dist._verify_params_across_processes(group, parameters, None)  # type: ignore[attr-defined]
    _broadcast([*parameters, *model.buffers()], group)
    return Replicas(
        model=model,
        group=group,
        bucket_bytes_cap=BUCKET_BYTES,
        is_syncing=lambda: True,
        broadcast_buffers=lambda: _broadcast(list(model.buffers()), group),
    )


def _broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if tensors:
        dist._broadcast_coalesced(group, [tensor.detach() for tensor in tensors], _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]


class _WithoutReducer(DistributedDataParallel):
    """A view of a wrapped model; it is never constructed, see `without_reducer`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*inputs, **kwargs)


def without_reducer(model: DistributedDataParallel, module: nn.Module | None = None) -> DistributedDataParallel:
    """Return a view of a model: it shares all attributes, and its forward is that of the wrapped module alone.

    Arguments:
        model: the wrapped model.
        module: takes the place of the wrapped module in the view; None is that one.
    """
    view = object.__new__(_WithoutReducer)
    attributes = model.__dict__ if module is None else {**model.__dict__, "_modules": {"module": module}}
    object.__setattr__(view, "__dict__", attributes)
    return view


def reason_for_reducer(model: DistributedDataParallel) -> str | None:
    """Return why only the reducer can average the gradients of a model; None if it is their mean over all ranks."""
    reasons = {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "mixed_precision": model.mixed_precision is not None,
        "a communication hook": bool(model._comm_hooks),
        "a buffer hook": hasattr(model, "buffer_hook"),
        "parameters that it ignores": bool(model.parameters_to_ignore),
        "delayed parameters": model._delay_all_reduce_all_params,
        "the Python reducer": model._use_python_reducer,
    }
    found = next((f"DistributedDataParallel has {name}" for name, is_used in reasons.items() if is_used), None)
    return found or reason_against(model.module)


def reason_against(model: nn.Module) -> str | None:
    """Return why a step cannot average the gradients of a module; None if it can."""
    from torch.distributed.tensor import DTensor  # not in every build of torch, and slow to import

    parameters = list(model.parameters())
    if not parameters:  # torch ends the process when it compares none among ranks
        return "the model has no parameters"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "the model has sparse gradients"
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return "the model has DTensors"
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "steps average gradients on CPUs only"
    return None


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` of FSDP2 was called on a module of a model."""
    from torch.distributed.fsdp import FSDPModule  # not in every build of torch, and slow to import

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _broadcast_buffers(model: DistributedDataParallel) -> None:
    """Copy the buffers of rank 0 to all ranks, unless `broadcast_buffers` is off or there are none."""
    if model._join_config.enable:  # the others answer the collectives of the reducer
        raise TargetError("ranks without batches cannot join() a compiled step: give all ranks equally many batches")
    if model._comm_hooks:
        raise TargetError("a communication hook came after compile_step, which leaves it out: register it before")
    if model.broadcast_buffers and model.modules_buffers:
        model._sync_buffers()  # type: ignore[no-untyped-call]
