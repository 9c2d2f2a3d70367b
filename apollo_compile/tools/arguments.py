"""Arguments of commands; they are checked before torch is imported.

split_target("train.py:build") -> ("train.py", "build")
positive, above_zero            types for `argparse`
"""

from __future__ import annotations

import argparse
import ast
import math
from pathlib import Path

from apollo_compile.errors import CallError


def split_target(text: str) -> tuple[str, str]:
    """Return the file or module, and the function, that `text` names.

    Raises:
        CallError: `text` names no function; the message lists the functions of a file that exists.
    """
    place, _, name = text.rpartition(":")
    if place and name.isidentifier():
        return place, name
    forms = "path/to/file.py:function or package.module:function"
    if Path(text).suffix != ".py":
        raise CallError(f"{text!r} names no function; expected {forms}")
    if not Path(text).exists():
        raise CallError(f"{text!r} names no function, and there is no such file; expected {forms}")
    known = [f"{text}:{function}" for function in _functions_of(Path(text))]
    raise CallError(f"{text!r} names no function; expected one that returns (model, inputs): {_list(known, text)}")


def _list(known: list[str], text: str) -> str:
    return ", ".join(known) if known else f"{text}:function, but the file defines none"


def _functions_of(path: Path) -> list[str]:
    """Return the public functions that a file defines, in order; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number
