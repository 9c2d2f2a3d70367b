"""Calls of operators with tensor metadata instead of tensors, and sizes as sympy expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

Expr: TypeAlias = Any
"""A sympy expression; sympy has no annotations."""

ZERO: Expr = sympy.Integer(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """The shape of a tensor and the bytes of its distinct elements."""

    shape: tuple[Expr, ...]
    num_bytes: Expr
    dtype: str = "float32"
    itemsize: int = 4

    @property
    def num_elements(self) -> Expr:
        """Number of elements, including repeated ones."""
        return product(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """A call of an operator, with metadata instead of tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    """The distinct tensors among the arguments, in order."""
    outputs: tuple[TensorMeta, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that was passed by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Formula: TypeAlias = Callable[[OperatorCall], Expr]


def product(factors: Iterable[Any]) -> Expr:
    """Return the product of sizes."""
    constant = 1
    result = sympy.Integer(1)
    for factor in factors:  # integers first: sympy's own product is a hundred times slower
        if isinstance(factor, int | sympy.Integer):
            constant *= int(factor)
        else:
            result = result * factor
    return result * constant


def total_bytes(tensors: Iterable[Any]) -> Expr:
    """Return the total bytes of the tensors among some values."""
    return sympy.Add(*(tensor.num_bytes for tensor in tensors if isinstance(tensor, TensorMeta)))


def distinct_tensors(value: Any) -> tuple[TensorMeta, ...]:
    """Return the tensors in `value`, at any depth, in order; a tensor that occurs twice counts once."""
    found: dict[int, TensorMeta] = {}
    _collect(value, found)
    return tuple(found.values())


def _collect(value: Any, found: dict[int, TensorMeta]) -> None:
    if isinstance(value, TensorMeta):
        found.setdefault(id(value), value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
