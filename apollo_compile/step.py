"""The training step as the unit: forward, loss, backward and optimizer of all micro-batches as one program.

step = compile_step(model, loss_fn, optimizer, microbatches=4);    loss = step(batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apollo_compile.session.step.arguments import StepSettings, check_arguments
from apollo_compile.session.step.loss import LossFunction
from apollo_compile.session.step.split import Split, Weigh, split_evenly
from apollo_compile.session.step.step import Step

__all__ = ["Step", "compile_step"]


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    microbatches: int = 1,
    clip_grad_norm: float | None = None,
    split: Split | None = None,
    weigh: Weigh | None = None,
    keep_gradients: bool = False,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
) -> Step:
    """Return a function that takes one training step per call: `loss = step(batch)`.

    A step computes the loss of every micro-batch and the gradients of their weighted mean, clips them and steps the
    optimizer, as this loop does:

        optimizer.zero_grad()
        for part, weight in zip(split(batch, microbatches), weights):
            (loss_fn(model, part) * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    A program that does not clip releases each gradient as soon as the optimizer has used it, so that they are never all
    in memory at once.

    Arguments:
        model: the module that is trained, not compiled. If it is in DistributedDataParallel or under FSDP2, gradients
            are averaged over its ranks before they are clipped.
        loss_fn: `loss_fn(model, micro_batch)` returns the loss, a tensor without dimensions, alone, first in a tuple,
            or as `loss` in a dictionary; None is `model(**micro_batch).loss`, for models that compute their loss. What
            else it returns is copied, and in `step.outputs` afterwards, without a graph. A loss function with graph
            breaks runs as a loop.
        optimizer: steps inside the program, module by module, if it is one of torch that treats every parameter by
            itself, else at the end; None leaves gradients in `.grad`, added to what is there.
        microbatches: into how many parts of equal size a batch is split.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        split: `split(batch, microbatches)` returns the parts; None cuts all tensors along dimension 0.
        weigh: how much a micro-batch counts; None is equally. Weights are divided by their sum.
        keep_gradients: whether gradients stay in `.grad` after the step, for code that reads them there.
        mesh: ranks, in one dimension, that average the gradients of a model without a wrapper. The parameters and
            buffers of the first one are copied to all others here, and buffers at the beginning of every step.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is no module, or is compiled; `loss_fn` cannot be called; `optimizer` is none, or its step
            needs an argument; `mesh` has several dimensions, or the model is in a wrapper or is not on CPUs.
        ConfigError: `microbatches` is not above 0, or an option is unknown or has a wrong value.
    """
    loss_fn = own_loss if loss_fn is None else loss_fn
    check_arguments(model, loss_fn, optimizer, microbatches, clip_grad_norm)
    settings = StepSettings(
        microbatches=microbatches,
        clip_grad_norm=clip_grad_norm,
        split=split or split_evenly,
        weigh=weigh,
        keep_gradients=keep_gradients,
        mesh=mesh,
        options=dict(options or {}),
    )
    return Step(model, loss_fn, optimizer, settings)


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the loss that a model computes by itself: `model(**batch).loss`."""
    returned = model(**batch)
    return returned["loss"] if isinstance(returned, Mapping) else returned.loss
