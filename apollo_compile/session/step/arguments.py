"""Settings of a training step, and checks of its arguments before anything is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apollo_compile.errors import ConfigError, TargetError
from apollo_compile.session.step.split import Split, Weigh
from apollo_compile.torch_bridge.compile_context import original_callable


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Arguments of `compile_step` besides model, loss function and optimizer."""

    microbatches: int
    clip_grad_norm: float | None
    split: Split
    weigh: Weigh | None
    keep_gradients: bool
    mesh: DeviceMesh | None
    options: Mapping[str, Any]


def check_arguments(
    model: object, loss_fn: object, optimizer: object, microbatches: object, clip_grad_norm: object
) -> None:
    """Check the arguments of `compile_step`.

    Raises:
        TargetError: `model` is no module, or is compiled; `loss_fn` cannot be called; `optimizer` is none, or its step
            needs an argument.
        ConfigError: `microbatches` or `clip_grad_norm` is not above 0.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(f"cannot compile steps of a {type(model).__name__}: expected a torch.nn.Module")
    if original_callable(model) is not model:
        raise TargetError("the model is compiled already: pass the module that was given to torch.compile")
    if not callable(loss_fn):
        raise TargetError(f"loss_fn is a {type(loss_fn).__name__}; expected a function, loss_fn(model, micro_batch)")
    _check_optimizer(optimizer)
    is_count = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1
    if not is_count:
        hint = "; it is no longer searched for: take 1, or as many as memory asks for" if microbatches == "auto" else ""
        raise ConfigError(f"microbatches is {microbatches!r}; expected a number of at least 1{hint}")
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, Real) and float(clip_grad_norm) > 0):
        raise ConfigError(f"clip_grad_norm is {clip_grad_norm!r}; expected a norm above 0, or None")


def with_casts_apart(options: Mapping[str, Any] | None, microbatches: int) -> dict[str, Any]:
    """Return options with which several micro-batches share casts, unless they say otherwise."""
    return {"partition.casts": "apart" if microbatches > 1 else "together", **(options or {})}


def _check_optimizer(optimizer: object) -> None:
    """Check that an optimizer can be stepped; wrappers of frameworks count too.

    Raises:
        TargetError: it cannot.
    """
    if optimizer is None:
        return
    step = getattr(optimizer, "step", None)
    if isinstance(optimizer, type) or not callable(step) or not hasattr(optimizer, "zero_grad"):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise TargetError(f"optimizer is {got}; expected an optimizer, such as a torch.optim.Optimizer, or None")
    of_class = getattr(type(optimizer), "step", None)  # schedulers put a function in its place that takes anything
    taken = list(inspect.signature(of_class).parameters.values())[1:] if inspect.isfunction(of_class) else []
    needed = [each.name for each in taken if _is_needed(each)]
    if needed:
        raise TargetError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)}, which a compiled step does not have; expected "
            "an optimizer that steps by the gradients in .grad; with None they are left there"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not is_variadic
