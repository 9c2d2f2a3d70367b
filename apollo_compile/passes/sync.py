"""Stage 4: drop the waits that are already implied.

    (SegmentGraph, Plan) -> SyncPlan

A segment depends on the producers of its inputs, on the segments it must come after, and on the segments that used its
units last, because two lanes that share a unit would otherwise run at the same time. With a memory quota it also
depends on every segment that ends before it starts in the plan: the plan keeps the quota only for segments that it
runs together, and measured durations may differ from planned ones. Within a lane, lane order enforces all of this.
Across lanes a wait is needed only if no chain of lane order and kept waits already reaches the producer.

We walk the segments in start order and keep, per segment, a vector clock: how many segments of every lane have ended
when it starts. The producers of one segment are visited latest first. A wait for a later producer merges that
producer's clock, and with it every earlier producer that it implies, so a dropped dependency is implied by waits that
are kept. A kept wait stays needed: a chain to its producer would have to pass through the lane's previous segment or
through a kept wait for a later producer, and both clocks were merged before. The result is the transitive reduction,
which is unique.

Guarantees: every dependency is enforced, and removing any kept wait would lose one. `waits` and `dropped` together
are the cross-lane dependencies; both are in start order of the consumer.
Source: Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988; Aho, Garey, Ullman,
"The transitive reduction of a directed graph", 1972, https://doi.org/10.1137/0201008
"""

from __future__ import annotations

from apollo_compile.ir import Dependency, Plan, SegmentGraph, SegmentId, SyncPlan


def eliminate_syncs(graph: SegmentGraph, plan: Plan) -> SyncPlan:
    """Return the cross-lane dependencies of the plan, split into those that need a wait and those that do not."""
    order = plan.in_start_order()
    rank = {assignment.segment: index for index, assignment in enumerate(order)}
    producers = _cross_lane_producers(graph, plan)
    lane_clock = [[0] * len(plan.lanes) for _ in plan.lanes]
    ended: dict[SegmentId, tuple[int, ...]] = {}
    """Vector clock at the end of each segment: how many segments of every lane have ended by then."""
    waits: list[Dependency] = []
    dropped: list[Dependency] = []
    for assignment in order:
        consumer, clock = assignment.segment, lane_clock[assignment.lane]
        for producer in sorted(producers[consumer], key=rank.__getitem__, reverse=True):
            lane = plan.assignments[producer].lane
            dependency = Dependency(producer=producer, consumer=consumer)
            if clock[lane] >= ended[producer][lane]:
                dropped.append(dependency)
            else:
                waits.append(dependency)
                clock[:] = map(max, clock, ended[producer])
        clock[assignment.lane] += 1
        ended[consumer] = tuple(clock)
    return SyncPlan(waits=tuple(waits), dropped=tuple(dropped))


def _cross_lane_producers(graph: SegmentGraph, plan: Plan) -> list[set[SegmentId]]:
    """Return, per segment, the segments on other lanes that it must wait for by data, order, units or memory."""
    lane_of = [assignment.lane for assignment in plan.assignments]
    found = [set(graph.predecessors(segment.id)) for segment in graph.segments]
    last_user: dict[int, SegmentId] = {}
    for assignment in plan.in_start_order():
        for unit in plan.lanes[assignment.lane].units:
            if unit in last_user:
                found[assignment.segment].add(last_user[unit])
            last_user[unit] = assignment.segment
        if plan.memory_quota is not None:
            found[assignment.segment].update(
                other.segment for other in plan.assignments if other.end_ns <= assignment.start_ns
            )
    return [{other for other in others if lane_of[other] != lane_of[segment]} for segment, others in enumerate(found)]
