"""Run a user's model without side effects: state is copied, and parameters are copied on write."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from apollo_compile.errors import TargetError
from apollo_compile.torch_bridge.trees import flatten_objects, leaves_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class PrivateCopy:
    """A copy of a module, or of one of its methods, whose calls do not change the original.

    Attributes, buffers and submodules are copied. Parameters are new objects, without gradients and with their own
    version counters, but share the memory of the originals until `own` is called before a write. A function is not
    copied.

    Raises:
        TargetError: the module has an attribute that cannot be copied.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.run = model
        self._shared: dict[int, nn.Parameter] = {}
        owner = getattr(model, "__self__", model)
        if isinstance(owner, nn.Module):
            shared = {
                id(parameter): nn.Parameter(parameter.data, parameter.requires_grad)
                for parameter in owner.parameters()
                if type(parameter) is nn.Parameter  # subclasses, as in lazy modules, define their own copy
            }
            tensors = leaves_of([vars(part) for part in owner.modules()], torch.Tensor)
            results = {id(each): each.detach().clone().requires_grad_() for each in tensors if not each.is_leaf}
            name, advice = f"the model, a {type(owner).__name__},", "check attributes besides tensors"
            self.run = _copy(model, name, advice, {**shared, **results})  # torch does not copy results of autograd
            self._shared = {id(parameter): parameter for parameter in shared.values()}

    def state(self) -> tuple[torch.Tensor, ...]:
        """Return parameters and buffers of the copy; nothing for a function."""
        owner = getattr(self.run, "__self__", self.run)
        return (*owner.parameters(), *owner.buffers()) if isinstance(owner, nn.Module) else ()

    def own(self, tensors: Sequence[Any]) -> None:
        """Copy the memory of parameters among these tensors, before something writes to them."""
        for tensor in tensors:
            if (parameter := self._shared.pop(id(tensor), None)) is not None:
                parameter.data = parameter.data.clone()


def copy_inputs(call: Arguments) -> Arguments:
    """Return a deep copy of the arguments of a call.

    Raises:
        TargetError: an argument cannot be copied.
    """
    copied: Arguments = _copy(call, "the inputs", "pass tensors that are leaves: call detach() on them", {})
    return copied


def _copy(value: Any, name: str, advice: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise TargetError(
            f"cannot copy {name} to plan it without side effects: {type(error).__name__}: {error}; {advice}"
        ) from error


@contextmanager
def same_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch at the end of the `with`."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def with_batch(call: Arguments, batch: int) -> Arguments:
    """Return the call with inputs of another batch size; the batch size is the most common first dimension.

    Raises:
        TargetError: no tensor has a dimension, or `batch` is below 1.
    """
    leaves, _, build = flatten_objects(call)
    sizes = Counter(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    if not sizes or batch < 1:
        raise TargetError(f"cannot try batch {batch}: expected a batch of at least 1 and inputs with a first dimension")
    size = sizes.most_common(1)[0][0]
    changed: Arguments = build([_resize(leaf, size, batch) for leaf in leaves])
    return changed


def _resize(value: Any, size: int, batch: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != size:
        return value
    picked = value.detach()[torch.arange(batch, device=value.device) % size]
    return picked.requires_grad_(value.requires_grad)
