"""Summary of a compilation: every number of a report, computed once.

    (Compilation, Trace) -> GraphSummary

`timelines.py` makes timelines; `branches.py` summarizes modules and branches.

A segment's bottleneck is the largest part of its predicted time: arithmetic (`compute`), bytes (`memory`) or fixed
times (`launch`); it is `waiting` if the units of its lane were idle before it for longer than it runs.

The quota that a segment asks for is the smallest number of units on which it takes, alone, at most `ASKED_TOLERANCE`
longer than on any other number. It is granted the units of its lane.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Mapping, Sequence

from apollo_compile.ir import Lane, LaneId, Mode, Segment, SegmentGraph, Trace, Variant
from apollo_compile.reports.branches import name_branches, summarize_modules, summarize_pairs
from apollo_compile.reports.ensembles import find_ensembles
from apollo_compile.reports.timelines import make_timelines
from apollo_compile.reports.values import (
    Bottleneck,
    DeviceSummary,
    GraphSummary,
    LaneSummary,
    Limit,
    SegmentSummary,
    Timeline,
    UnitDuration,
    WaitSummary,
)
from apollo_compile.target.compilation import Compilation

ASKED_TOLERANCE = 0.02


def summarize(
    compilation: Compilation,
    trace: Trace,
    *,
    num_replans: int = 0,
    is_deterministic: bool = False,
    is_cold: bool = False,
    variant: str = Variant.PLAN,
    lane_bytes: Mapping[LaneId, int] = types.MappingProxyType({}),
    lane_memory_quota: int | None = None,
) -> GraphSummary:
    """Return the numbers of one graph.

    Arguments:
        compilation: the graph and its plan.
        trace: trace of a run of its plan, empty before the first run.
        num_replans: number of replans.
        is_deterministic: whether replanning is disabled.
        is_cold: whether the plan runs, but was not called often enough for a trace.
        variant: the variant that runs now.
        lane_bytes: bytes of device memory that lanes took.
        lane_memory_quota: bytes of device memory that a lane may take; None is no limit.
    """
    graph, plan = compilation.partition.graph, compilation.plan
    branch_of = name_branches(compilation)
    timelines = make_timelines(compilation, trace)
    latest = timelines[-1]
    measured = {span.segment: span.end_ns - span.start_ns for span in trace.spans}
    waited = _waited(latest, plan.lanes)
    segments = tuple(
        _summarize_segment(
            compilation, a.segment, branch_of[a.segment], measured.get(a.segment), waited.get(a.segment, 0)
        )
        for a in plan.in_start_order()
    )
    critical_path_ns = critical_path(graph, [min(_durations(modes)) for modes in compilation.costs.modes])
    profile = compilation.profile
    return GraphSummary(
        name=graph.name,
        role=graph.role,
        origin=plan.origin,
        device=DeviceSummary(kind=profile.kind, name=profile.name, source=profile.source, units=profile.units),
        num_bodies=len(compilation.partition.bodies),
        num_lanes=plan.num_lanes,
        segments=segments,
        modules=summarize_modules(compilation, {segment.id: segment for segment in segments}),
        branches=tuple(dict.fromkeys(branch_of)),
        without_formula=compilation.capture.without_formula,
        pairs=summarize_pairs(compilation, branch_of, latest),
        lanes=tuple(
            LaneSummary(
                id=lane.id,
                units=lane.units,
                num_segments=sum(a.lane == lane.id for a in plan.assignments),
                predicted_ns=sum(a.duration_ns for a in plan.assignments if a.lane == lane.id),
                measured_ns=sum(s.end_ns - s.start_ns for s in trace.spans if s.lane == lane.id)
                if trace.spans
                else None,
                peak_bytes=compilation.memory.peak_bytes_by_lane[lane.id],
                taken_bytes=lane_bytes.get(lane.id),
                quota_bytes=lane_memory_quota,
            )
            for lane in plan.lanes
        ),
        waits=tuple(
            WaitSummary(producer=dependency.producer, consumer=dependency.consumer, kept=kept)
            for kept, dependencies in ((True, compilation.syncs.waits), (False, compilation.syncs.dropped))
            for dependency in dependencies
        ),
        timelines=timelines,
        predicted_ns=plan.makespan_ns,
        serial_ns=plan.serial_ns,
        bound_ns=plan.lower_bound_ns,
        gap=plan.gap,
        critical_path_ns=critical_path_ns,
        limit=Limit.DEPENDENCIES if critical_path_ns >= _load(compilation) else Limit.UNITS,
        candidates=plan.candidates,
        solver=plan.solver,
        seed=plan.seed,
        stopped_early=plan.stopped_early,
        pinned=plan.pinned,
        variant=variant,
        num_replans=num_replans,
        peak_bytes=compilation.memory.peak_bytes,
        memory_quota=plan.memory_quota,
        ensembles=find_ensembles(compilation),
        is_deterministic=is_deterministic,
        is_cold=is_cold,
    )


# -------------------------------------------------------------------------------------------------------- segments


def _summarize_segment(
    compilation: Compilation, segment_id: int, branch: str, measured_ns: int | None, waited_ns: int
) -> SegmentSummary:
    segment = compilation.partition.graph.segments[segment_id]
    assignment = compilation.plan.assignments[segment_id]
    modes = compilation.costs.modes[segment_id]
    mode = next(mode for mode in modes if mode.units == assignment.quota.units)
    fastest = min(_durations(modes))
    took_ns = assignment.duration_ns if measured_ns is None else measured_ns
    return SegmentSummary(
        id=segment_id,
        name=segment.name,
        module=segment.module,
        branch=branch,
        lane=assignment.lane,
        units=assignment.quota.units,
        asked_units=next(m.units for m in modes if m.duration_ns <= fastest * (1 + ASKED_TOLERANCE)),
        memory_bytes=assignment.quota.memory_bytes,
        predicted_ns=assignment.duration_ns,
        source=mode.source,
        measured_ns=measured_ns,
        waited_ns=waited_ns,
        bottleneck=_bottleneck(mode, is_waiting=waited_ns > took_ns),
        memory_share=mode.memory_share,
        launch_share=mode.launch_share,
        choices=tuple(UnitDuration(units=m.units, duration_ns=m.duration_ns, source=m.source) for m in modes),
        after=compilation.partition.graph.predecessors(segment.id),
        others=_other_modules(compilation, segment),
    )


def _other_modules(compilation: Compilation, segment: Segment) -> tuple[str, ...]:
    """Return the modules in a segment besides its own, outermost only; of a whole step none: nodes have no place."""
    nodes, nodes_by_segment = compilation.capture.nodes, compilation.partition.nodes_by_segment
    inside = nodes_by_segment[segment.id] if nodes and nodes_by_segment else ()
    found = dict.fromkeys(nodes[node].module for node in inside if nodes[node].module)
    known = {segment.module, *found}
    return tuple(
        name for name in found if not any(name == segment.module or name.startswith(f"{outer}.") for outer in known)
    )


def _durations(modes: Sequence[Mode]) -> list[int]:
    return [mode.duration_ns for mode in modes]


def _bottleneck(mode: Mode, *, is_waiting: bool) -> Bottleneck:
    if is_waiting:
        return Bottleneck.WAITING
    shares = {
        Bottleneck.COMPUTE: 1 - mode.memory_share - mode.launch_share,
        Bottleneck.MEMORY: mode.memory_share,
        Bottleneck.LAUNCH: mode.launch_share,
    }
    return max(shares, key=lambda kind: shares[kind])


def _waited(timeline: Timeline, lanes: Sequence[Lane]) -> dict[int, int]:
    """Return, per segment, the idle time of the units of its lane before it."""
    free_at: dict[int, int] = defaultdict(int)
    waited = {}
    for bar in timeline.bars:
        units = lanes[bar.lane].units
        waited[bar.segment] = max(0, bar.start_ns - max((free_at[unit] for unit in units), default=bar.start_ns))
        for unit in units:
            free_at[unit] = bar.end_ns
    return waited


# ---------------------------------------------------------------------------------------------------------- limits


def critical_path(graph: SegmentGraph, durations: Sequence[int]) -> int:
    """Return the length of the longest chain of segments with these durations."""
    ends: list[int] = []
    for segment in graph.segments:
        start = max((ends[other] for other in graph.predecessors(segment.id)), default=0)
        ends.append(start + durations[segment.id])
    return max(ends, default=0)


def _load(compilation: Compilation) -> float:
    """Return the makespan if every segment ran on its most efficient number of units and no unit were idle."""
    units = len(compilation.plan.lanes[0].units)
    return sum(min(mode.units * mode.duration_ns for mode in modes) for modes in compilation.costs.modes) / units
