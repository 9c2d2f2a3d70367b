"""Check the device memory of every lane against its quota.

    account(recording, streams, quota) -> LaneMemory per lane, or MemoryQuotaError

A CUDA graph allocates only while it is captured, so the quota is checked then: each of the allocator's segments belongs
to a stream, and a lane is a stream. A CUDA graph over its quota is dropped before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apollo_compile.device.gpu.run.gpu import Recording, Stream
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
    """Return the memory of every lane.

    Arguments:
        recording: the captured CUDA graph.
        streams: streams by lane.
        graph: the graph whose segments the lanes launched.
        launched: segments by lane, for the message.
        quota: bytes that one lane may take; None means no limit.

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
