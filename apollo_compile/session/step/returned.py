"""Values that a loss function returns: the loss, alone or among other tensors, which are outputs of the step."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from apollo_compile.errors import TargetError
from apollo_compile.torch_bridge.trees import leaves_of, map_leaves, map_tensors, map_together, structure_of

_WAY_OUT = "(return the tensors instead, and read `step.outputs` after the step)"

READS_WHOLE_NUMBERS = f"the loss function reads whole numbers of tensors {_WAY_OUT}"

KEEPS_TENSORS = (
    f"the loss function keeps tensors besides those that it returns, or numbers of them {_WAY_OUT}, or the model "
    "assigns some"
)


def loss_in(returned: Any) -> torch.Tensor:
    """Return the loss in the result of a loss function.

    Raises:
        TargetError: it is no tensor without dimensions.
    """
    loss = find_loss(returned)
    leaves = () if isinstance(returned, torch.Tensor) else leaves_of(returned)
    unknown = next((each for each in leaves if isinstance(each, Mapping)), None)
    if unknown is not None:  # its tensors would not be found
        raise TargetError(f"the loss function returned a {type(unknown).__name__}; expected a dict, tuple or list")
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TargetError(
            f"the loss function returned a {type(loss).__name__}{shape} as the loss; expected a tensor without "
            "dimensions, a tuple that begins with one, or a mapping that has one as 'loss'"
        )
    return loss


def detach_others(returned: Any) -> Any:
    """Return the result of a loss function, with copies without a graph of all tensors but the loss."""
    loss = find_loss(returned)
    if loss is returned:
        return returned
    return map_tensors(lambda tensor: tensor if tensor is loss else tensor.detach().clone(), returned)


class Outputs:
    """Results of the loss function in a step, by micro-batch and without graphs; combined at the first access."""

    def __init__(self, returned: Sequence[Any] = (), weights: Sequence[float] = ()) -> None:
        self.returned, self._weights = returned, weights

    @functools.cached_property
    def combined(self) -> Any:
        """The outputs of the step, in the structure of the results of the loss function; None if there are none.

        With one micro-batch they are its result. With several, floating-point numbers and tensors without dimensions
        are weighted means, and other tensors are stacked along a new first dimension. Tensors of different shapes, and
        other values that differ, become lists.

        Raises:
            TargetError: it returned other structures for some micro-batches.
        """
        if len(self.returned) < 2:
            return self.returned[0] if self.returned else None
        structures = set(map(structure_of, self.returned))
        if len(structures) > 1:
            raise TargetError(
                f"the loss function returned outputs of {len(structures)} structures for {len(self.returned)} "
                f"micro-batches, which cannot be combined: {', '.join(sorted(structures))}"
            )
        return map_together(self._join, self.returned)

    def _join(self, *values: Any) -> Any:
        first = values[0]
        is_tensor = isinstance(first, torch.Tensor)
        if isinstance(first, float) or (is_tensor and first.is_floating_point() and not first.dim()):
            return weighted_sum(values, self._weights)
        if is_tensor:
            return torch.stack(values) if len({each.shape for each in values}) == 1 else list(values)
        return first if all(each == first for each in values) else list(values)


class Number(float):
    """A number that the loss function reads of an output of its graph, which may have no value yet."""

    output: torch.Tensor


def watch_reads(output: torch.Tensor, note: Callable[[Number], None]) -> None:
    """Let `output.item()` return a `Number`, and call `note` with it."""
    weakly = weakref.ref(output)  # which holds this function

    def item() -> Number:
        source = weakly()
        assert source is not None, "it is being read"
        number = Number(torch.Tensor.item(source) if source.numel() else math.nan)
        number.output = source
        note(number)
        return number

    output.item = item  # type: ignore[method-assign]


def with_values(returned: Any) -> Any:
    """Return the result of the loss function, with the values of the numbers that it read."""
    return map_leaves(Number, lambda number: torch.Tensor.item(number.output), returned)


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the sum of values, each times its weight, from the first to the last; tensors are copied."""
    if len(values) == 1 and weights[0] == 1 and isinstance(values[0], torch.Tensor):
        return values[0].clone()
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def find_loss(returned: Any) -> Any:
    """Return the value at the place of the loss; Dynamo traces this function."""
    if isinstance(returned, tuple | list) and returned:
        return returned[0]
    return returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
