"""Priorities of lanes that share units.

    rank_lanes(graph, plan, costs) -> urgency by lane, 0 for the least urgent

A lane is as urgent as the longest path from any of its segments to the end of the graph: a delay there delays the step.
Durations are those on the whole device, since lanes that share units are not held to their quotas.
"""

from __future__ import annotations

from apollo_compile.ir import CostTable, LaneId, Plan, SegmentGraph


def rank_lanes(graph: SegmentGraph, plan: Plan, costs: CostTable) -> dict[LaneId, int]:
    """Return the urgency of the lanes that a plan uses; of lanes with equal paths, the first is the most urgent.

    Arguments:
        graph: segments in a topological order.
        plan: plan of the graph.
        costs: costs of its segments.
    """
    rest_ns = [0] * len(graph.segments)
    for segment in reversed(graph.segments):
        readers = {reader for buffer in segment.outputs for reader in graph.buffers[buffer].readers}
        longest = max((rest_ns[reader] for reader in readers), default=0)
        rest_ns[segment.id] = longest + costs.modes[segment.id][-1].duration_ns
    longest_by_lane: dict[LaneId, int] = {}
    for assignment in plan.assignments:
        path = max(longest_by_lane.get(assignment.lane, 0), rest_ns[assignment.segment])
        longest_by_lane[assignment.lane] = path
    order = sorted(longest_by_lane, key=lambda lane: (longest_by_lane[lane], -lane))
    return {lane: urgency for urgency, lane in enumerate(order)}
