"""Where two copies of a training differ, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def copy_values(value: Any) -> Any:
    """Return a value with copies of its tensors, which later steps leave alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copy_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copy_values(each) for each in value]
    return value


def find_difference(ours: Any, theirs: Any, rtol: float, atol: float, where: str = "") -> str | None:
    """Return the first difference between two values of containers, tensors and other objects; None if they agree."""
    if isinstance(theirs, torch.Tensor):
        return _find_in_tensor(ours, theirs, rtol, atol, where)
    if isinstance(theirs, Mapping):
        if not isinstance(ours, Mapping) or ours.keys() != theirs.keys():
            return f"{where}: ours has {list(ours) if isinstance(ours, Mapping) else ours}, eager {list(theirs)}"
        pairs = [(f"{where}.{key}", ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, list | tuple):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            return f"{where}: ours is {ours}, eager's {theirs}"
        pairs = [(f"{where}[{place}]", *both) for place, both in enumerate(zip(ours, theirs, strict=True))]
    elif is_dataclass(theirs):
        pairs = [(f"{where}.{f.name}", getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(theirs)]
    elif isinstance(theirs, float):
        return _find_in_tensor(torch.tensor(ours), torch.tensor(theirs), rtol, atol, where)
    else:
        return None if ours == theirs or ours is theirs else f"{where}: ours is {ours!r}, eager's {theirs!r}"
    return next((found for name, a, b in pairs if (found := find_difference(a, b, rtol, atol, name))), None)


def _find_in_tensor(ours: Any, theirs: torch.Tensor, rtol: float, atol: float, where: str) -> str | None:
    if not isinstance(ours, torch.Tensor):
        return f"{where}: ours is {ours!r}, eager's a tensor"
    if differing := [f"{a}, eager's {b}" for a, b in zip(_facts(ours), _facts(theirs), strict=True) if a != b]:
        return f"{where}: ours has {'; '.join(differing)}"
    ours, theirs = ours.detach(), theirs.detach()
    if theirs.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if theirs.is_nested:
        return _find_in_tensor(ours.values(), theirs.values(), rtol, atol, where)
    if torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
        return None
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    off = (ours.to(wide) - theirs.to(wide)).abs().max().item()
    return f"{where}: off by {off:.3g} of {theirs.abs().max().item():.3g}"


def _facts(tensor: torch.Tensor) -> list[str]:
    strides = [f"strides {tensor.stride()}"] if tensor.layout is torch.strided and not tensor.is_nested else []
    sizes = [] if tensor.is_nested else [f"shape {list(tensor.shape)}"]
    return [str(tensor.dtype), str(tensor.layout), *sizes, *(strides if tensor.numel() else [])]
