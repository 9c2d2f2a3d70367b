"""Plan a training step before it runs: `apollo_compile.explain_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apollo_compile.config import load_config
from apollo_compile.device.open import select_profile
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Trace, Variant
from apollo_compile.reports.outlook import planned_state
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.step.arguments import check_arguments, with_casts_apart
from apollo_compile.session.step.loss import LossFunction
from apollo_compile.session.step.prediction import predict_step
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import own_loss


def explain_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    microbatches: int = 1,
    clip_grad_norm: float | None = None,
    keep_gradients: bool = False,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Return a report of the plan of a training step of `compile_step`, without training.

    The model is traced on a copy that shares the memory of its parameters; neither the model nor the optimizer changes.
    Nothing is sent to other ranks: means of gradients take as long as over an assumed link.

    Arguments:
        model: the module to train, not compiled; alone or in DistributedDataParallel.
        loss_fn: as for `compile_step`.
        batch: the batch of one step.
        optimizer: as for `compile_step`.
        microbatches: number of parts of equal size to split the batch into.
        clip_grad_norm: as for `compile_step`.
        keep_gradients: as for `compile_step`.
        split: as for `compile_step`.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is not a module, is under FSDP2 or cannot be copied, the batch cannot be split, or there
            is no loss with a gradient; see `compile_step`.
        ConfigError: an argument or an option has a wrong value.
        InfeasiblePlanError: no plan meets the memory quota.
    """
    loss_fn = own_loss if loss_fn is None else loss_fn
    check_arguments(model, loss_fn, optimizer, microbatches, clip_grad_norm)
    config = load_config(with_casts_apart(options, microbatches))
    parts = (split or split_evenly)(batch, microbatches)
    try:
        compilation = predict_step(
            model,
            loss_fn,
            parts,
            optimizer=optimizer,
            clip_grad_norm=clip_grad_norm,
            keep_gradients=keep_gradients,
            config=config,
            profile=select_profile(config),
        )
    except UnsupportedGraphError as error:
        detail = f"{Variant.LOOP}: {error}"
        state = State(graph="step", stage=Stage.FALLS_BACK, detail=detail)
        return Report(graphs=(), fallbacks=(), states=(state,))
    state = planned_state(compilation.capture.name, None)  # predictions are checked for forwards and backwards alone
    return Report(graphs=(summarize(compilation, Trace()),), fallbacks=(), states=(state,))
