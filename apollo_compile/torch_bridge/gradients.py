"""Gradients in `.grad`, in memory as autograd leaves them there; and whether those of two ways are alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

_TOLERANCE = 0.01
"""Largest difference of a gradient over its norm that is rounding, or sixteen roundings of its dtype."""

_NEGLIGIBLE = 1e-5
"""Share of the norm of all gradients below which one does not matter."""


def leave_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Store gradients in `.grad`, added to existing ones."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)


def find_shared(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], taken: Collection[int]
) -> Collection[int]:
    """Return places of gradients that autograd would not leave in `.grad` as they are.

    There they are laid out like their parameters, each in memory of its own.

    Arguments:
        gradients: by parameter.
        parameters: of these gradients.
        taken: addresses of memory that is in use.
    """
    used, found = set(taken), set[int]()
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        memory = gradient.untyped_storage().data_ptr()
        if memory in used or gradient.stride() != parameter.stride():
            found.add(place)
        used.add(memory)
    return found


def own_gradients(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], shared: Collection[int]
) -> Sequence[torch.Tensor]:
    """Return gradients, those at the `shared` places copied into memory laid out like their parameters."""
    owned = list(gradients)
    for place in shared:
        owned[place] = torch.empty_like(parameters[place]).copy_(gradients[place])
    return owned


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether the norms of gradients are finite."""
    return all(map(math.isfinite, map(_norm_of, gradients)))


def describe_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Return which gradient is another one than expected; None if they are alike but for rounding.

    The difference of a gradient that is zero but for rounding is judged beside the norm of all gradients.
    """
    norms = [_norm_of(each) for each in expected]
    least = max(_NEGLIGIBLE * math.hypot(*norms), 1e-30)
    for ours, theirs, norm in zip(found, expected, norms, strict=True):
        difference = _norm_of(ours - theirs) / (norm + least)
        allowed = max(_TOLERANCE, 16 * torch.finfo(theirs.dtype).eps)
        if not difference <= allowed:
            what = f"one of shape {list(theirs.shape)} by {difference:.2g} of its norm"
            return f"{what}, where {allowed:.2g} may be rounding"
    return None


def _norm_of(gradient: torch.Tensor) -> float:
    elements = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return float(torch.linalg.vector_norm(elements, dtype=torch.float64))
