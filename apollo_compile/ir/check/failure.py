"""The error that checks raise, and how it names places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from apollo_compile.errors import InvariantError
from apollo_compile.ir.values import SegmentGraph, SegmentId


def fail(product: str, found: str, where: str) -> NoReturn:
    """Raise the error of a product: what was found, and where."""
    raise InvariantError(
        f"{product} is not legal: {found}; at {where}; this is a defect of apollo_compile, please report it"
    )


def at_segment(graph: SegmentGraph, segment: SegmentId) -> str:
    """Return how an error names a segment."""
    return f"graph {graph.name}, segment {segment} ({graph.segments[segment].name})"


def repeated(items: Sequence[object]) -> list[object]:
    """Return the items that are there more than once."""
    return [item for item in dict.fromkeys(items) if list(items).count(item) > 1]
