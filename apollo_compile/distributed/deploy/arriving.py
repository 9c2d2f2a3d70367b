"""Tensors that may be under way from other ranks: code goes on until it reads their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from apollo_compile.torch_bridge.trees import map_tensors


class Arriving(torch.Tensor):
    """A tensor of shape and type only; the first function that reads its values waits for another in its place."""

    plain: torch.Tensor | None
    """The tensor in its place; None as long as the call that makes it is held back."""
    waits: list[Callable[[], Any]]
    source: str
    """Name of the call that makes it, if somebody asks for that."""

    def __new__(
        cls, like: torch.Tensor, waits: Iterable[Callable[[], Any]], plain: torch.Tensor | None = None, source: str = ""
    ) -> Arriving:
        """Return a tensor like another; `plain` is in its place when it is used, after some calls."""
        found = torch.empty_like(like, device="meta", requires_grad=like.requires_grad).as_subclass(cls)
        found.plain, found.waits, found.source = plain, list(waits), source
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on the tensors that have arrived; what it asks of shape and type is known before."""
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return func(*arrived(args), **arrived(kwargs or {}))


_KNOWN = (
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "requires_grad")),
)


def arrived(tree: Any, *, waits: bool = True) -> Any:
    """Return a tree with plain tensors after waiting for those under way; else they have no values yet, or are None."""

    def plain_of(tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, Arriving):
            return tensor
        while waits and tensor.waits:
            tensor.waits.pop()()
        return tensor.plain

    return map_tensors(plain_of, tree)
