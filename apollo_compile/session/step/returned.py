"""What a loss function returns: the loss, alone or among other tensors, which are outputs of the step.

loss_in(returned) -> the loss;    detach_others(returned);    combine(returned by micro-batch, weights) -> outputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apollo_compile.errors import TargetError
from apollo_compile.session.step.split import kind_of
from apollo_compile.torch_bridge.trees import map_tensors, map_together


def loss_in(returned: Any) -> torch.Tensor:
    """Return the loss among what a loss function returned.

    Raises:
        TargetError: it is no tensor without dimensions.
    """
    loss = find_loss(returned)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TargetError(
            f"the loss function returned a {type(loss).__name__}{shape} as the loss; expected a tensor without "
            "dimensions, a tuple that begins with one, or a mapping that has one as 'loss'"
        )
    return loss


def detach_others(returned: Any) -> Any:
    """Return what a loss function returned, with copies without a graph of all tensors but the loss."""
    loss = find_loss(returned)
    if loss is returned:
        return returned
    return map_tensors(lambda tensor: tensor if tensor is loss else tensor.detach().clone(), returned)


def combine(returned: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the outputs of a step, of what the loss function returned for every micro-batch.

    They have its structure. Of one micro-batch they are what it returned; of several, floating-point tensors without
    dimensions are weighted means, and other tensors are stacked along a new first dimension.

    Raises:
        TargetError: it returned other structures or shapes for some micro-batches.
    """
    if len(returned) == 1:
        return returned[0]
    kinds = [kind_of([each]) for each in returned]
    if any(kind != kinds[0] for kind in kinds):
        raise TargetError(
            f"the loss function returned outputs of other structures or shapes for some of {len(returned)} "
            "micro-batches, which cannot be combined"
        )

    def join(*values: Any) -> Any:
        if not isinstance(values[0], torch.Tensor):
            return values[0]
        is_scalar = values[0].is_floating_point() and not values[0].dim()
        return weighted_sum(values, weights) if is_scalar else torch.stack(values)

    return map_together(join, returned)


def detach(returned: Any) -> Any:
    """Return what a loss function returned, with tensors without a graph."""
    return map_tensors(torch.Tensor.detach, returned)


def weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the sum of values, each times its weight, from the first to the last."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def find_loss(returned: Any) -> Any:
    """Return what is at the place of the loss; Dynamo traces it."""
    if isinstance(returned, tuple | list) and returned:
        return returned[0]
    return returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
