"""The error that checks raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from apollo_compile.errors import InvariantError
from apollo_compile.ir import SegmentGraph, SegmentId


def fail(product: str, found: str, where: str) -> NoReturn:
    """Raise `InvariantError` for an illegal product."""
    raise InvariantError(
        f"{product} is not legal: {found}; at {where}; this is a defect of apollo_compile, please report it"
    )


def at_segment(graph: SegmentGraph, segment: SegmentId) -> str:
    """Return the place of a segment, for an error message."""
    return f"graph {graph.name}, segment {segment} ({graph.segments[segment].name})"


def repeated(items: Sequence[object]) -> list[object]:
    """Return the items that occur more than once."""
    return [item for item in dict.fromkeys(items) if list(items).count(item) > 1]
