"""DistributedDataParallel without its reducer, for steps that average gradients themselves.

is_sharded(model)           whether FSDP2 has its parameters
reason_against(model)       why a step has to leave gradients to the reducer; None if it need not
without_reducer(model)      the same module, whose forward prepares nothing for the reducer
broadcast_buffers(model)    what a forward of it does first

The reducer is in C++: it waits for hooks of autograd, and sends a bucket when all of its hooks were called. The program
of a step calls no autograd. It sends the buckets itself, as segments.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _WithoutReducer(DistributedDataParallel):
    """A view of a wrapped model; it is never constructed, see `without_reducer`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*inputs, **kwargs)


def without_reducer(model: DistributedDataParallel) -> DistributedDataParallel:
    """Return a view of a model: it shares all attributes, and its forward is that of the wrapped module alone."""
    view = object.__new__(_WithoutReducer)
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def reason_against(model: DistributedDataParallel) -> str | None:
    """Return why only the reducer can average the gradients of a model; None if it is their mean over all ranks."""
    from torch.distributed.tensor import DTensor  # not in every build of torch, and slow to import

    parameters = list(model.module.parameters())
    reasons = {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "mixed_precision": model.mixed_precision is not None,
        "a communication hook": bool(model._comm_hooks),
        "a buffer hook": hasattr(model, "buffer_hook"),
        "parameters that it ignores": bool(model.parameters_to_ignore),
        "delayed parameters": model._delay_all_reduce_all_params,
        "the Python reducer": model._use_python_reducer,
        "sparse gradients": any(getattr(module, "sparse", False) for module in model.modules()),
        "DTensors": any(isinstance(parameter, DTensor) for parameter in parameters),
    }
    found = next((name for name, is_used in reasons.items() if is_used), None)
    if found is not None:
        return f"DistributedDataParallel has {found}"
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "steps average gradients on CPUs only"
    return None


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` of FSDP2 was called on a module of a model."""
    from torch.distributed.fsdp import FSDPModule  # not in every build of torch, and slow to import

    return any(isinstance(module, FSDPModule) for module in model.modules())


def broadcast_buffers(model: DistributedDataParallel) -> None:
    """Copy the buffers of rank 0 to all ranks, unless `broadcast_buffers` is off or there are none."""
    if model.broadcast_buffers and model.modules_buffers:
        model._sync_buffers()  # type: ignore[no-untyped-call]


def is_syncing(model: DistributedDataParallel) -> bool:
    """Return whether backwards average gradients: False inside of `no_sync`."""
    return bool(model.require_backward_grad_sync)


def reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients the reducer averages."""
    return [parameter for parameter in model.module.parameters() if parameter.requires_grad]
