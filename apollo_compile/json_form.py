"""Products as JSON: one form for everything that is stored in a file.

    to_json(product)            -> dicts, lists, numbers and strings, ready for json.dumps
    from_json(cls, value)       -> the product, every field checked against its type
    parse(text)                 -> dicts, lists, numbers and strings, or `ValueError`

Frozen dataclasses become objects with their fields by name, tuples become lists, enums their value, mappings objects
with string keys. Files are data: reading one executes nothing, and a missing, unknown or mistyped field is a
`ValueError` that names its place; so is an integer of more than 64 bits, or text that cannot be encoded in UTF-8.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_Product = TypeVar("_Product")

_hints = functools.cache(typing.get_type_hints)

_MAX_INTEGER = 2**63 - 1


def to_json(value: Any) -> Any:
    """Return `value` as a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


def parse(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def from_json(cls: type[_Product], value: Any, *, place: str | None = None) -> _Product:
    """Return the product of type `cls` that `to_json` wrote.

    Arguments:
        cls: a frozen dataclass.
        value: a JSON value.
        place: name of the value in messages; None is the name of the class, "" a whole file.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message names its place.
    """
    try:
        return typing.cast(_Product, _read(cls, value, cls.__name__ if place is None else place))
    except RecursionError:  # the repr of a wrong value may be nested as deeply as the parser allows
        raise ValueError("it is nested too deeply") from None


def _read(kind: Any, value: Any, place: str) -> Any:
    while isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(kind, value, place)
    if origin is typing.Literal:
        return _expect(value in typing.get_args(kind), value, f"one of {list(typing.get_args(kind))}", place)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), value, place)
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), value, "an object", place)
        of = typing.get_args(kind)[1]
        return {_read(str, key, place): _read(of, item, f"{place}[{key!r}]") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, place)
    if issubclass(kind, enum.Enum):
        _expect(value in [member.value for member in kind], value, f"one of {[m.value for m in kind]}", place)
        return kind(value)
    if kind is float:
        is_number = isinstance(value, float) or _is_integer(value)
        return float(_expect(is_number and math.isfinite(value), value, "a number", place))
    if kind is int:
        return _expect(_is_integer(value), value, "a value of type int with at most 64 bits", place)
    if kind is str:
        is_text = isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)  # surrogates
        return _expect(is_text, value, "a value of type str", place)
    return _expect(isinstance(value, kind), value, f"a value of type {kind.__name__}", place)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MAX_INTEGER <= value <= _MAX_INTEGER


def _read_union(kind: Any, value: Any, place: str) -> Any:
    members = typing.get_args(kind)
    if value is None:
        return _expect(type(None) in members, value, "a value", place)
    for member in (member for member in members if member is not type(None)):
        try:
            return _read(member, value, place)
        except ValueError as error:
            problem = error
    raise problem


def _read_tuple(kinds: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), value, "a list", place)
    if len(kinds) == 2 and kinds[1] is ...:
        return tuple(_read(kinds[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}", place)
    return tuple(_read(kind, item, f"{place}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _read_dataclass(kind: Any, value: Any, place: str) -> Any:
    _expect(isinstance(value, dict), value, "an object", place)
    hints = _hints(kind)
    if unknown := set(value) - set(hints):
        raise ValueError(f"{place or 'it'} has unknown fields {sorted(unknown)}; known: {', '.join(hints)}")
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    if missing := required - set(value):
        raise ValueError(f"{place or 'it'} has no field {', '.join(sorted(missing))}")
    prefix = f"{place}." if place else ""
    return kind(**{name: _read(hints[name], item, f"{prefix}{name}") for name, item in value.items()})


def _expect(condition: bool, value: Any, expected: str, place: str) -> Any:
    if not condition:
        text = repr(value)
        raise ValueError(f"{place} is {text if len(text) <= 60 else text[:57] + '...'}; expected {expected}")
    return value
