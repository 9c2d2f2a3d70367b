"""Order relations: those that a graph and a plan require, and those that a sync plan enforces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from apollo_compile.ir import BufferId, Plan, SegmentGraph, SegmentId, SyncPlan


def needed_order(graph: SegmentGraph, plan: Plan) -> list[tuple[SegmentId, SegmentId]]:
    """Return every pair (earlier, later) that data, order, shared units or the memory quota require."""
    needed = {(producer, segment.id): None for segment in graph.segments for producer in graph.predecessors(segment.id)}
    order = plan.in_start_order()
    for unit in plan.lanes[0].units:
        users = [assignment.segment for assignment in order if unit in plan.lanes[assignment.lane].units]
        needed.update(dict.fromkeys(itertools.pairwise(users)))
    if plan.memory_quota is not None:
        needed.update(((a.segment, b.segment), None) for a in order for b in order if a.end_ns <= b.start_ns)
    return list(needed)


def direct_order(plan: Plan, syncs: SyncPlan) -> list[list[SegmentId]]:
    """Return, per segment, the segment before it on its lane and those that it waits for."""
    direct: list[list[SegmentId]] = [[] for _ in plan.assignments]
    latest: dict[int, SegmentId] = {}
    for assignment in plan.in_start_order():
        if assignment.lane in latest:
            direct[assignment.segment].append(latest[assignment.lane])
        latest[assignment.lane] = assignment.segment
    for wait in syncs.waits:
        direct[wait.consumer].append(wait.producer)
    return direct


def closure(direct: Sequence[Sequence[int]], order: Iterable[int] | None = None) -> list[int]:
    """Return all predecessors of every segment or node as a bit mask.

    Arguments:
        direct: direct predecessors of each.
        order: a topological order; None is ascending order.
    """
    before = [0] * len(direct)
    for segment in range(len(direct)) if order is None else order:
        for other in direct[segment]:
            before[segment] |= before[other] | 1 << other
    return before


def users_of(graph: SegmentGraph, buffer: BufferId) -> tuple[SegmentId, ...]:
    """Return the segments that make or read a buffer."""
    item = graph.buffers[buffer]
    return item.readers if item.producer is None else (item.producer, *item.readers)
