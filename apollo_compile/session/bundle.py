"""What AOTAutograd's cache keeps of a graph, so that the next process neither traces nor compiles it.

    SegmentsBundle    a graph that runs in segments
    WholeBundle       a graph that Inductor compiled whole, while the other one of its model runs in segments
    FallbackBundle    what is known of a Dynamo graph that falls back
    cache_key         what shaped both, besides what AOTAutograd knows

Inductor keeps the code of every segment by itself; but to ask for it takes a traced graph, and tracing takes most of a
warm start. A bundle holds what was made of the graph: segments, plan, and the code of bodies. What is known only later,
the plan from measured durations and the verdict, is in the history, which is asked again when a bundle becomes a graph.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apollo_compile
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
    """The graph that Inductor would compile whole; None where no contest is held."""
    kwargs: Mapping[str, Any]
    """What AOTAutograd says of that graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeBundle:
    """A graph that Inductor compiled whole, as data."""

    role: Role
    reason: str
    """Why it is Inductor's."""
    left: Compilation | None
    """Its plan, where it has one that is not worth compiling."""
    history_key: str | None
    code: Any
    """Inductor's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackBundle:
    """Why a Dynamo graph falls back to torch.compile, which keeps its code in its own caches."""

    role: Role
    reason: str
    left: Compilation | None
    """Its plan, where it has one that is not worth compiling."""
    history_key: str | None


def cache_key(around: str, paths: str) -> str:
    """Return what shapes the bundles of a Dynamo graph besides what AOTAutograd knows.

    Arguments:
        around: its circumstances; see `history.circumstances`.
        paths: which modules its nodes come from; segments are cut and named after them.
    """
    return hashlib.sha256(f"{_own_code()} {around} {paths}".encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return a digest of this package: bundles hold its objects, and are for no other version."""
    digest = hashlib.sha256()
    root = Path(apollo_compile.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.glob("_native*")]):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()
