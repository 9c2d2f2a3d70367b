"""Cache entries of graphs in AOTAutograd's cache: with them, the next process neither traces nor compiles.

    SegmentsBundle    a graph that runs in segments
    WholeBundle       a graph that Inductor compiled whole, while the other graph of its model runs in segments
    FallbackBundle    why a Dynamo graph falls back

Inductor caches the code of every segment by itself; but looking it up takes a traced graph, and tracing takes most of a
warm start. A bundle holds the compiled graph: segments, plan, and the code of bodies. What is known only later (the
plan from measured durations, and the verdict) is in the history, which is consulted when a bundle is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apollo_compile.ir import Role
from apollo_compile.session.planning import Fallback
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Contract
from apollo_compile.torch_bridge.serialize import BundledBody


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsBundle:
    """A graph that runs in segments, as data."""

    compilation: Compilation
    """With the first plan."""
    history_key: str | None
    """Key of its finding in the history; None where findings are not kept."""
    bodies: tuple[BundledBody, ...]
    contract: Contract
    original: bytes | None
    """The graph for Inductor to compile whole; None where variants are not compared."""
    kwargs: Mapping[str, Any]
    """Arguments that AOTAutograd passed for that graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeBundle:
    """A graph that Inductor compiled whole, as data."""

    role: Role
    fallback: Fallback
    history_key: str | None
    code: Any
    """Inductor's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackBundle:
    """Why a Dynamo graph falls back to torch.compile, which has its own caches for the code."""

    role: Role
    fallback: Fallback
    history_key: str | None
