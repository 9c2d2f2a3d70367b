"""Attributes of torch's objects that have no public name.

mark_boxed(run)             AOTAutograd passes the inputs in a list, which `run` empties
has_gradient_hooks(tensor)  whether a hook sees its gradient
is_compiled_module(model)   whether a module is the result of `torch.compile`
TANGENT                     how AOTAutograd's names of gradients that a backward is given begin
"""

from __future__ import annotations

from typing import TypeVar

import torch

TANGENT = "tangents_"

_Callable = TypeVar("_Callable")


def mark_boxed(run: _Callable) -> _Callable:
    """Let AOTAutograd pass the inputs of `run` in a list, and return `run`."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a hook sees the gradient of a leaf, before or after it is accumulated."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def is_compiled_module(model: object) -> bool:
    """Return whether a module is the result of `torch.compile`."""
    return hasattr(model, "_orig_mod")
