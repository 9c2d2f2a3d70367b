"""Stage 5: decide when every buffer is released.

    (SegmentGraph, Plan, SyncPlan) -> MemoryPlan

A buffer may be released once its producer and all its readers have ended, by a lane that is ordered after them. Its
hold segment is the first segment in start order that is ordered after each of these users by lane order and waits, or
is the last user itself. Mostly it is the last reader; its body then takes the buffer over and may reuse it. Where the
readers are on lanes that no later segment is ordered after, there is no hold segment, and the buffer is released at the
end of the run. A buffer without readers is released right after its producer. Graph inputs are handed over by the
caller and treated the same; graph outputs are never released.

On a GPU (`owners_release`) the host releases buffers while lanes still run, and the memory of a buffer returns to the
lane that allocated it, which may overwrite it at once. There a hold segment must be on the producer's lane, and graph
inputs, which belong to no lane, stay until the end of the run.

Guarantees: no buffer is released before its owner lane is ordered after its readers; every buffer that is not a graph
output has exactly one hold or is released at the end. The peaks count buffers that segments produce, from the start of
the producer to the end of the hold segment; they count neither graph inputs nor allocations inside bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from apollo_compile.ir import Buffer, BufferId, Hold, LaneId, MemoryPlan, Plan, SegmentGraph, SegmentId, SyncPlan


def plan_memory(graph: SegmentGraph, plan: Plan, syncs: SyncPlan, *, owners_release: bool = False) -> MemoryPlan:
    """Return the hold of every buffer that is not a graph output, and the planned peaks.

    `owners_release` requires hold segments to be on the lane of the producer.
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
    """Return the vector clock at the end of every segment: how many segments of each lane have ended by then."""
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
    """Lane of the producer."""
    start_ns: int
    end_ns: int
    num_bytes: int


def _lifetimes(graph: SegmentGraph, plan: Plan, holds: Iterable[Hold]) -> list[_Lifetime]:
    """Return the lifetime of every buffer that a segment produces."""
    end_of = {hold.buffer: plan.assignments[hold.segment].end_ns for hold in holds}
    found = []
    for buffer in graph.buffers:
        if buffer.producer is not None:
            made = plan.assignments[buffer.producer]
            end_ns = end_of.get(buffer.id, plan.makespan_ns)
            found.append(_Lifetime(made.lane, made.start_ns, end_ns, buffer.num_bytes))
    return found


def _peak(lifetimes: Sequence[_Lifetime]) -> int:
    """Return the most bytes alive at one time; at one instant, ends come before starts."""
    changes = [(life.end_ns, 0, -life.num_bytes) for life in lifetimes]
    changes += [(life.start_ns, 1, life.num_bytes) for life in lifetimes]
    peak = level = 0
    for _, _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak
