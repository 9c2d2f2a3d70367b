"""Split a batch into micro-batches, and tell kinds of micro-batches apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from apollo_compile.errors import TargetError
from apollo_compile.torch_bridge.trees import flatten_objects, kind_of_tree, parts_of

Split = Callable[[Any, int], Sequence[Any]]
"""`split(batch, k)` returns k micro-batches."""

Weigh = Callable[[Any], float]
"""`weigh(micro_batch)` returns its weight, such as its number of tokens."""


def split_evenly(batch: Any, count: int) -> Sequence[Any]:
    """Return `count` parts of a batch, with all tensors cut along dimension 0.

    Raises:
        TargetError: there is no tensor, one has no dimension, or another size along it than the others, or one that is
            no multiple of `count`; or a list has an element for every sample.
    """
    if count == 1:
        return [batch]
    leaves, _, unflatten = flatten_objects(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise TargetError(
            f"cannot split a batch into {count} micro-batches: found no tensors in a {type(batch).__name__}; expected "
            "tensors, in dictionaries, lists, tuples or data classes, or pass split="
        )
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % count:
        raise TargetError(
            f"cannot split a batch into {count} micro-batches: its tensors have sizes {sorted(sizes)} along "
            f"dimension 0 (0 if there is none); expected one size, a multiple of {count}, or pass split="
        )
    _refuse_lists(batch, min(sizes), count)
    pieces = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else count * (leaf,) for leaf in leaves]
    return [unflatten(part) for part in zip(*pieces, strict=True)]


def weigh_parts(parts: Sequence[Any], weigh: Weigh | None) -> Sequence[float]:
    """Return the weights of micro-batches, which sum to one; equal weights where `weigh` is None.

    Raises:
        TargetError: they have no sum to divide by.
    """
    counts = [1.0] * len(parts) if weigh is None else [float(weigh(part)) for part in parts]
    total = sum(counts)
    if not total or not math.isfinite(total):
        raise TargetError(f"the {len(parts)} micro-batches weigh {counts}; expected a finite sum other than zero")
    return [count / total for count in counts]


def kind_of(parts: Sequence[Any]) -> Hashable | None:
    """Return structure, shapes and dtypes, for which micro-batches are compiled; None if they are not alike."""
    first, *others = map(kind_of_tree, parts)
    return first if all(each == first for each in others) else None


def _refuse_lists(value: Any, size: int, count: int) -> None:
    """Refuse lists that have an element other than a tensor for every sample: they would not be split."""
    parts = value if isinstance(value, tuple) else parts_of(value).values()
    is_list = isinstance(value, list | tuple) and len(value) == size
    if is_list and not any(isinstance(each, torch.Tensor | dict | list | tuple) for each in value):
        raise TargetError(
            f"cannot split a batch into {count} micro-batches: a {type(value).__name__} in it has {size} elements, "
            f"one for every sample, such as {value[0]!r}; expected a tensor there, or pass split="
        )
    for each in parts:
        _refuse_lists(each, size, count)
