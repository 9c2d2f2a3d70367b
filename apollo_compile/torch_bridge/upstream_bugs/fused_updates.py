"""Fused kernels of optimizers that compute something else than the plain loop over operators.

    differs_from_plain(optimizer class, settings, dtype, device) -> bool

On a CPU, the fused kernel of SGD skips every full vector of a parameter of lower precision, and leaves other memory in
its momentum. So a fused kernel that the user did not ask for is compared with the plain loop before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

_NUM_ELEMENTS = 256
"""Several vectors of every kind of processor."""

_NUM_STEPS = 3
"""The first step makes the state, later ones read it."""

_BRANCHES = ("momentum", "dampening", "nesterov", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay")
"""Settings that select what a kernel computes."""

_MOST_ROUNDINGS = 64
"""Largest difference that is rounding, in units of the dtype's precision."""


def differs_from_plain(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether the fused kernel of an optimizer differs from the plain one; looked at once per process.

    Arguments:
        kind: class of the optimizer.
        settings: of a group of parameters; those that select what the kernel computes count.
        dtype: of the parameters.
        device: where they are.
    """
    branches = tuple((name, settings[name]) for name in _BRANCHES if settings.get(name))
    return _differs(kind, branches, dtype, device)  # type: ignore[arg-type]  # its class says it cannot be hashed


@functools.cache
def _differs(
    kind: type[torch.optim.Optimizer], branches: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device
) -> bool:
    plain, fused = (_train(kind, dict(branches), dtype, device, is_fused=each) for each in (False, True))
    allowed = _MOST_ROUNDINGS * torch.finfo(dtype).eps
    return not all(  # the count of steps may have another dtype
        torch.allclose(ours.to(theirs.dtype), theirs, rtol=allowed, atol=allowed)
        for ours, theirs in zip(fused, plain, strict=True)
    )


def _train(
    kind: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_fused: bool,
) -> list[torch.Tensor]:
    """Return a parameter and its state after a few steps with gradients that are always the same."""
    places = torch.arange(_NUM_ELEMENTS, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.sin(places).to(device, dtype))
    optimizer = kind([parameter])  # type: ignore[call-arg]
    optimizer.param_groups[0].update({**settings, "lr": 0.1, "fused": is_fused, "foreach": False})
    for step in range(_NUM_STEPS):
        parameter.grad = torch.cos((step + 1) * places).to(device, dtype)
        optimizer.step()
    state = optimizer.state[parameter].values()
    return [parameter.detach(), *(each.detach() for each in state if isinstance(each, torch.Tensor))]
