"""Checks of cost tables and plans."""

from __future__ import annotations

import itertools

from apollo_compile.ir import CostTable, Plan, SegmentGraph, SegmentId
from apollo_compile.ir.check.failure import at_segment, fail


def check_costs(costs: CostTable, graph: SegmentGraph) -> None:
    """Check that every segment has modes, ascending in units, with durations of at least 1 ns and shares of time."""
    if len(costs.modes) != len(graph.segments):
        fail("cost table", f"expected {len(graph.segments)} rows, got {len(costs.modes)}", f"graph {graph.name}")
    if costs.handover_ns < 0:
        fail("cost table", f"handover_ns must not be negative, got {costs.handover_ns}", f"graph {graph.name}")
    for index, modes in enumerate(costs.modes):
        units = [mode.units for mode in modes]
        at = at_segment(graph, SegmentId(index))
        if not modes or units != sorted(set(units)) or units[0] < 0:
            fail("cost table", f"expected at least one mode, units ascending from 0, got units {units}", at)
        if wrong := [mode for mode in modes if not (0 <= mode.memory_share <= 1 and 0 <= mode.launch_share <= 1)]:
            fail("cost table", f"expected shares of memory and launches between 0 and 1, got {wrong}", at)
        if wrong := [mode for mode in modes if mode.duration_ns < 1 or mode.memory_bytes < 0]:
            fail("cost table", f"expected durations of at least 1 ns and sizes of at least 0, got {wrong}", at)


def check_plan(plan: Plan, graph: SegmentGraph, costs: CostTable) -> None:
    """Check that dependencies, hand-over times and units are respected at every instant, and check the makespans."""
    where = f"graph {graph.name}"
    if [a.segment for a in plan.assignments] != list(range(len(graph.segments))):
        fail("plan", f"expected one assignment per segment, got {[a.segment for a in plan.assignments]}", where)
    if not plan.lanes or [lane.id for lane in plan.lanes] != list(range(len(plan.lanes))):
        fail("plan", f"expected lanes 0, 1, ..., got {[lane.id for lane in plan.lanes]}", where)
    everything = set(plan.lanes[0].units)
    for lane in plan.lanes:
        if list(lane.units) != sorted(set(lane.units)) or not set(lane.units) <= everything:
            fail("plan", f"units must ascend and be some of lane 0's, got {lane.units}", f"{where}, lane {lane.id}")
    for assignment in plan.assignments:
        at = at_segment(graph, assignment.segment)
        if not 0 <= assignment.lane < len(plan.lanes):
            fail("plan", f"lane {assignment.lane} does not exist, there are {len(plan.lanes)}", at)
        if assignment.start_ns < 0:
            fail("plan", f"starts at {assignment.start_ns} ns", at)
        if assignment.quota.units != len(plan.lanes[assignment.lane].units):
            units = len(plan.lanes[assignment.lane].units)
            fail("plan", f"lane {assignment.lane} has {units} units, the quota {assignment.quota.units}", at)
        quota = assignment.quota
        durations = [
            mode.duration_ns
            for mode in costs.modes[assignment.segment]
            if (mode.units, mode.memory_bytes) == (quota.units, quota.memory_bytes)
        ]
        if not durations:
            fail("plan", f"(units, memory) {(quota.units, quota.memory_bytes)} is none of its modes", at)
        if assignment.duration_ns < durations[0]:
            fail("plan", f"takes {assignment.duration_ns} ns, {durations[0]} ns even without neighbours", at)
    _check_order_of_collectives(plan, graph)
    _check_times(plan, graph, costs)
    last = max((a.end_ns for a in plan.assignments), default=0)
    if plan.makespan_ns != last:
        fail("plan", f"the last segment ends at {last} ns, the makespan is {plan.makespan_ns} ns", where)
    serial = sum(m.duration_ns for modes in costs.modes for m in modes if m.units == len(everything))
    if plan.serial_ns != serial:
        fail("plan", f"all on lane 0 takes {serial} ns, serial_ns is {plan.serial_ns}", where)
    if not 0 <= plan.lower_bound_ns <= plan.undisturbed_ns <= plan.makespan_ns:
        claims = f"{plan.lower_bound_ns}, {plan.undisturbed_ns}, {plan.makespan_ns} ns"
        fail("plan", f"expected bound <= undisturbed makespan <= makespan, got {claims}", where)
    if plan.memory_quota is not None and (peak := _peak_bytes(plan, graph)) > plan.memory_quota:
        fail("plan", f"holds {peak} bytes at once, the memory quota is {plan.memory_quota}", where)
    if plan.makespan_ns > plan.serial_ns and not plan.pinned:
        fail("plan", f"serial takes {plan.serial_ns} ns, this plan {plan.makespan_ns} ns", where)


def _check_order_of_collectives(plan: Plan, graph: SegmentGraph) -> None:
    """Check that segments with collectives run in graph order without overlap, as on all other ranks."""
    communicating = [segment.id for segment in graph.segments if segment.has_collective]
    for first, second in itertools.pairwise(communicating):
        end, start = plan.assignments[first].end_ns, plan.assignments[second].start_ns
        if start < end:
            found = (
                f"issues its collectives from {start} ns on, before those of segment {first} "
                f"({graph.segments[first].name}) are done at {end} ns, which come first in the graph: other ranks keep "
                "that order, and would exchange the wrong tensors or wait forever"
            )
            fail("plan", found, at_segment(graph, second))


def _peak_bytes(plan: Plan, graph: SegmentGraph) -> int:
    """Return the peak bytes of workspaces and of buffers made by the graph, if segments run at their planned times."""
    changes = []
    for segment, assignment in zip(graph.segments, plan.assignments, strict=True):
        changes += [(assignment.start_ns, segment.workspace_bytes), (assignment.end_ns, -segment.workspace_bytes)]
    for buffer in graph.buffers:
        if buffer.producer is not None:
            last = max(plan.assignments[user].end_ns for user in (buffer.producer, *buffer.readers))
            end = plan.makespan_ns if buffer.is_output else last
            changes += [(plan.assignments[buffer.producer].start_ns, buffer.num_bytes), (end, -buffer.num_bytes)]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _check_times(plan: Plan, graph: SegmentGraph, costs: CostTable) -> None:
    def check_order(before: SegmentId, after: SegmentId, why: str) -> None:
        first, second = plan.assignments[before], plan.assignments[after]
        ready = first.end_ns + (costs.handover_ns if first.lane != second.lane else 0)
        if second.start_ns < ready:
            found = f"starts at {second.start_ns} ns, but {why} segment {before} on lane {first.lane} until {ready} ns"
            fail("plan", found, at_segment(graph, after))

    for segment in graph.segments:
        for producer in graph.predecessors(segment.id):
            check_order(producer, segment.id, "depends on")
    last_user: dict[int, SegmentId] = {}
    for assignment in plan.in_start_order():
        for unit in plan.lanes[assignment.lane].units:
            if unit in last_user:
                check_order(last_user[unit], assignment.segment, f"shares unit {unit} with")
            last_user[unit] = assignment.segment
