"""What AOTAutograd's cache keeps of a graph, so that the next process neither traces nor compiles it.

    SegmentsBundle    a graph that runs in segments
    WholeBundle       a graph that Inductor compiled whole, while the other one of its model runs in segments
    FallbackBundle    what is known of a Dynamo graph that falls back

Inductor keeps the code of every segment by itself; but to ask for it takes a traced graph, and tracing takes most of a
warm start. A bundle holds what was made of the graph: segments, plan, and the code of bodies. What is known only later,
the plan from measured durations and the verdict, is in the history, which is asked again when a bundle becomes a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apollo_compile.device.target import Contract
from apollo_compile.ir import Role
from apollo_compile.pipeline import Compilation
from apollo_compile.torch_bridge.serialize import BundledBody


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsBundle:
    """A graph that runs in segments, as data."""

    compilation: Compilation
    """As planned at first."""
    history_key: str | None
    """Where what later runs found out about it is kept; None where nothing is."""
    bodies: tuple[BundledBody, ...]
    contract: Contract
    original: bytes | None
    """The graph that Inductor would compile whole; None where no comparison is held."""
    kwargs: Mapping[str, Any]
    """What AOTAutograd says of that graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeBundle:
    """A graph that Inductor compiled whole, as data."""

    role: Role
    reason: str
    """Why it is Inductor's."""
    unprofitable: Compilation | None
    """Its plan, where it has one that is not worth compiling."""
    history_key: str | None
    code: Any
    """Inductor's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackBundle:
    """Why a Dynamo graph falls back to torch.compile, which keeps its code in its own caches."""

    role: Role
    reason: str
    unprofitable: Compilation | None
    """Its plan, where it has one that is not worth compiling."""
    history_key: str | None
