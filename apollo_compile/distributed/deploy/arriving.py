"""Tensors that may be under way from other ranks: code goes on until it reads their values.

arriving(plain, like, waits, source) -> Arriving;  arrived(tree) -> tree of plain tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apollo_compile.torch_bridge.trees import map_tensors


class Arriving(torch.Tensor):
    """A tensor that may be under way; the first function that reads its values waits for it."""

    plain: torch.Tensor | None
    """None as long as the call that makes it is held back."""
    like: torch.Tensor
    """A tensor of the same shape and type."""
    waits: list[Callable[[], Any]]
    source: str
    """Name of the call that makes it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on the tensors that have arrived; what it asks of a shape is known before."""
        if func in _ASK_FOR_SHAPES and isinstance(args[0], Arriving):
            return func(args[0].like, *args[1:], **kwargs or {})
        return func(*arrived(args), **arrived(kwargs or {}))


_ASK_FOR_SHAPES = (
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype")),
)


def arriving(plain: torch.Tensor | None, like: torch.Tensor, waits: list[Callable[[], Any]], source: str) -> Arriving:
    """Return a tensor that becomes `plain` when it is used, after some calls."""
    found = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Arriving)  # without values to misread
    found.plain, found.like, found.waits, found.source = plain, like, waits, source
    return found


def arrived(tree: Any) -> Any:
    """Return a tree with plain tensors, after waiting for those under way."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Arriving):
            return tensor
        while tensor.waits:
            tensor.waits.pop()()
        assert tensor.plain is not None
        return tensor.plain

    return map_tensors(wait, tree)
