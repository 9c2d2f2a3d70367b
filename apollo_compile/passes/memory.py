"""Stage 5: when every buffer is let go.

    (SegmentGraph, Plan, SyncPlan) -> MemoryPlan

A buffer may go once its producer and all its readers have ended, and the lane that lets it go must know that: its
hold segment is the first one in start order that lane order and waits put after, or that is, each of them. Mostly
that is the last reader, and then the body takes the buffer and may reuse it. Readers on lanes that never meet again
leave no hold segment; such a buffer goes when the run is over. A buffer that nobody reads goes right after its
producer. Graph inputs are handed over by the call and treated alike; what the graph returns is never let go.

On a GPU (`owners_release`) the host lets buffers go while lanes still work, and the memory of a buffer goes back to the
lane that made it, which may fill it at once. There a hold segment must be one of the producer's own lane, and graph
inputs, which belong to no lane, stay until the run is over.

Guarantees: no buffer is released before its owner lane is ordered after its readers; every buffer that is not
returned is held exactly once or let go at the end. The peaks count buffers that segments produce, from the start of
the producer to the end of the hold segment; graph inputs belong to the caller, and what bodies allocate inside is
theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from apollo_compile.ir import Buffer, BufferId, Hold, LaneId, MemoryPlan, Plan, SegmentGraph, SegmentId, SyncPlan


def plan_memory(graph: SegmentGraph, plan: Plan, syncs: SyncPlan, *, owners_release: bool = False) -> MemoryPlan:
    """Return the hold of every buffer that the graph does not return, and the planned peaks.

    `owners_release` asks for hold segments on the lane of the producer.
    """
    order = [assignment.segment for assignment in plan.in_start_order()]
    rank = {segment: index for index, segment in enumerate(order)}
    ended = _clocks(plan, syncs)
    lane_of = [assignment.lane for assignment in plan.assignments]

    def find_hold(buffer: Buffer) -> SegmentId | None:
        if owners_release and buffer.producer is None:
            return None
        users = buffer.readers if buffer.producer is None else (*buffer.readers, buffer.producer)
        owner = lane_of[buffer.producer] if owners_release and buffer.producer is not None else None
        first = max((rank[user] for user in users), default=0)
        for segment in order[first:]:
            if owner in (None, lane_of[segment]) and all(
                ended[segment][lane_of[user]] >= ended[user][lane_of[user]] for user in users
            ):
                return segment
        return None

    holds: list[Hold] = []
    at_end: list[BufferId] = []
    for buffer in graph.buffers:
        if not buffer.is_output:
            segment = find_hold(buffer)
            if segment is None:
                at_end.append(buffer.id)
            else:
                holds.append(Hold(buffer=buffer.id, segment=segment))
    lifetimes = _lifetimes(graph, plan, holds)
    return MemoryPlan(
        holds=tuple(holds),
        at_end=tuple(at_end),
        peak_bytes_by_lane=tuple(_peak([life for life in lifetimes if life.lane == lane.id]) for lane in plan.lanes),
        peak_bytes=_peak(lifetimes),
    )


def _clocks(plan: Plan, syncs: SyncPlan) -> dict[SegmentId, tuple[int, ...]]:
    """Return, per segment, how many segments of every lane have certainly ended when it has."""
    producers: dict[SegmentId, list[SegmentId]] = {}
    for wait in syncs.waits:
        producers.setdefault(wait.consumer, []).append(wait.producer)
    lane_clock = [[0] * len(plan.lanes) for _ in plan.lanes]
    ended: dict[SegmentId, tuple[int, ...]] = {}
    for assignment in plan.in_start_order():
        clock = lane_clock[assignment.lane]
        for producer in producers.get(assignment.segment, ()):
            clock[:] = map(max, clock, ended[producer])
        clock[assignment.lane] += 1
        ended[assignment.segment] = tuple(clock)
    return ended


class _Lifetime(NamedTuple):
    lane: LaneId
    """Of the producer."""
    start_ns: int
    end_ns: int
    num_bytes: int


def _lifetimes(graph: SegmentGraph, plan: Plan, holds: Iterable[Hold]) -> list[_Lifetime]:
    """Return when every buffer that a segment produces is alive."""
    end_of = {hold.buffer: plan.assignments[hold.segment].end_ns for hold in holds}
    found = []
    for buffer in graph.buffers:
        if buffer.producer is not None:
            made = plan.assignments[buffer.producer]
            end_ns = end_of.get(buffer.id, plan.makespan_ns)
            found.append(_Lifetime(made.lane, made.start_ns, end_ns, buffer.num_bytes))
    return found


def _peak(lifetimes: Sequence[_Lifetime]) -> int:
    """Return the largest sum of bytes alive at one time; what ends at an instant is gone before what begins there."""
    changes = [(life.end_ns, 0, -life.num_bytes) for life in lifetimes]
    changes += [(life.start_ns, 1, life.num_bytes) for life in lifetimes]
    peak = level = 0
    for _, _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak
