"""Bytes that every lane took, against what it may take.

    account(recording, streams, quota) -> LaneMemory per lane, or MemoryQuotaError

A CUDA graph allocates while it is captured and never again, so this is where a quota is kept: the allocator's segments
say which stream each belongs to, and a lane is a stream. A graph over its quota is dropped before it ever ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apollo_compile.device.gpu.gpu import Recording, Stream
from apollo_compile.errors import MemoryQuotaError
from apollo_compile.ir import LaneId, SegmentGraph, SegmentId
from apollo_compile.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneMemory:
    """Device memory of one lane in a captured graph."""

    lane: LaneId
    num_bytes: int
    """In whole segments of the allocator, cuBLAS workspaces included."""


def account(
    recording: Recording,
    streams: Mapping[LaneId, Stream],
    *,
    graph: SegmentGraph,
    launched: Mapping[LaneId, tuple[SegmentId, ...]],
    quota: int | None,
) -> tuple[LaneMemory, ...]:
    """Return what every lane took.

    Arguments:
        recording: the captured graph.
        streams: the lanes' streams.
        graph: whose segments the lanes launched.
        launched: segments of every lane, for the message.
        quota: bytes that one lane may take; None is no limit.

    Raises:
        MemoryQuotaError: a lane took more.
    """
    lanes = sorted(streams)
    found = tuple(LaneMemory(lane=lane, num_bytes=recording.bytes_of(streams[lane])) for lane in lanes)
    for each in found:
        if quota is not None and each.num_bytes > quota:
            segments = launched[each.lane]
            largest = max(segments, key=lambda s: sum(graph.buffers[b].num_bytes for b in graph.segments[s].outputs))
            raise MemoryQuotaError(
                f"lane {each.lane} of {graph.name} took {format_bytes(each.num_bytes)} for {len(segments)} segments; "
                f"it may take {format_bytes(quota)}; most of it is kept for {graph.segments[largest].name}: raise "
                "'device.lane_memory_quota', or cut the graph with 'partition.max_segment_share'"
            )
    return found
