"""Gradients in `.grad`, in memory as autograd leaves them there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


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
