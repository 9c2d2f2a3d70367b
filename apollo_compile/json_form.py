"""Products as JSON: one form for everything that is kept in a file.

    to_json(product)            -> dicts, lists, numbers and strings, ready for json.dumps
    from_json(cls, value)       -> the product, every field checked against its type
    parse(text), read_file(path, max_bytes=...)  -> dicts, lists, numbers and strings, or `ValueError`
    check_format(content, ...)  the same content, if it is of the kind and the format that is expected
    write_file(path, text)      a file, at once or not at all

Frozen dataclasses become objects with their fields by name, tuples become lists, enums their value, mappings objects
with string keys. Files are data: reading one runs none of its content, and a missing, unknown or mistyped field is a
`ValueError` that names its place; so is a number of more than 64 bits, or text that no file can hold.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import stat
import threading
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

_Product = TypeVar("_Product")

_MAX_INTEGER = 2**63 - 1


def to_json(value: Any) -> Any:
    """Return `value` in terms of JSON."""
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


def check_format(content: Any, kind: str, number: int) -> dict[str, Any]:
    """Return `content`, which is a `kind` of thing that says of itself which number its format has.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(content, dict):
        raise ValueError(f"expected a {kind} of format {number}, got {type(content).__name__}")
    if content.get("format") != number:
        raise ValueError(f"expected a {kind} of format {number}, got format {content.get('format')!r:.40}")
    return content


def read_file(path: Path, *, max_bytes: int) -> Any:
    """Return the content of a file of JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, no regular file, or no JSON.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait for its writer
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return parse(content.decode("utf-8"))


def parse(text: str) -> Any:
    """Return what a text of JSON says. Raises `ValueError` where it is none, or too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_file(path: Path, text: str) -> None:
    """Write a file and the folders that it is in, at once or not at all. Raises `OSError` where that is impossible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)  # a reader sees the old file or the new one, never a part
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def from_json(cls: type[_Product], value: Any) -> _Product:
    """Return the product of type `cls` that `to_json` wrote.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message names its place.
    """
    try:
        return typing.cast(_Product, _read(cls, value, cls.__name__))
    except RecursionError:  # what is to be shown of a wrong value may be as deep as the parser just allowed
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
        return _expect(isinstance(value, str) and _is_text(value), value, "a value of type str", place)
    return _expect(isinstance(value, kind), value, f"a value of type {kind.__name__}", place)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MAX_INTEGER <= value <= _MAX_INTEGER


def _is_text(value: str) -> bool:
    """Whether a file can hold it: JSON can spell half of a character of two."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _read_union(kind: Any, value: Any, place: str) -> Any:
    choices = typing.get_args(kind)
    if value is None:
        return _expect(type(None) in choices, value, "a value", place)
    for choice in (choice for choice in choices if choice is not type(None)):
        try:
            return _read(choice, value, place)
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
        raise ValueError(f"{place} has unknown fields {sorted(unknown)}; known: {', '.join(hints)}")
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    if missing := required - set(value):
        raise ValueError(f"{place} has no field {', '.join(sorted(missing))}")
    return kind(**{name: _read(hints[name], item, f"{place}.{name}") for name, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _expect(condition: bool, value: Any, expected: str, place: str) -> Any:
    if not condition:
        text = repr(value)
        raise ValueError(f"{place} is {text if len(text) <= 60 else text[:57] + '...'}; expected {expected}")
    return value
