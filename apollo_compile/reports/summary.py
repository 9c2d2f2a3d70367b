"""Every number of a report, computed once.

    (Compilation, Trace) -> GraphSummary
    [GraphSummary], [(graph, reason)] -> Report

Renderings format these values and compute none of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apollo_compile.ir import Candidate, CostSource, Origin, Role, Trace
from apollo_compile.passes.plan import to_problem
from apollo_compile.pipeline import Compilation
from apollo_compile.planner.baselines import BASELINES
from apollo_compile.planner.simulate import execute
from apollo_compile.select import PLAN, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSummary:
    """One segment: where it ran, what was expected and what was seen."""

    name: str
    module: str
    lane: int
    units: int
    """Quota: units the segment may use; its lane has exactly these."""
    predicted_ns: int
    source: CostSource
    measured_ns: int | None
    """None before the first run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """One FX graph."""

    name: str
    role: Role
    origin: Origin
    num_bodies: int
    num_lanes: int
    """Lanes that the plan uses."""
    segments: tuple[SegmentSummary, ...]
    """In planned start order."""
    predicted_ns: int
    serial_ns: int
    """Predicted makespan on one lane."""
    bound_ns: int
    gap: float
    """How far the plan, undisturbed by interference, can be from the best one: 0.02 is at most 2 % above it."""
    candidates: tuple[Candidate, ...]
    """What the planner tried, in that order."""
    baselines: tuple[tuple[str, int], ...]
    """What other systems' rules would take on the same lanes: name and predicted makespan in nanoseconds."""
    solver: str | None
    seed: int
    stopped_early: bool
    """Whether the time limit ended the search."""
    pinned: bool
    """Whether the plan was read from a file."""
    way: str
    """How it runs now: see `apollo_compile.select`."""
    num_replans: int
    """How often it was planned again from measured durations."""
    measured_ns: int | None
    """Duration of the last run; None before the first."""
    overlap: float | None
    """Share of the measured duration in which at least two lanes were at work."""
    busy: float | None
    """Share of unit-time, over all units and the measured duration, in which a lane that has the unit was at work."""
    num_waits: int
    num_waits_dropped: int
    peak_bytes: int
    """Planned peak of buffers between segments."""
    timeline: str
    """Lanes over time: measured if there was a run, else planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All graphs of one model; prints as text."""

    graphs: tuple[GraphSummary, ...]
    handed_over: tuple[tuple[str, str], ...]
    """Graphs that Inductor runs whole, and why."""
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    """By name of the Dynamo graph, which way of running it was the fastest."""

    def __str__(self) -> str:
        from apollo_compile.reports.render_text import render_text

        return render_text(self)


def summarize(compilation: Compilation, trace: Trace, *, num_replans: int = 0, way: str = PLAN) -> GraphSummary:
    """Return the numbers of one graph; `trace` is of its plan, empty before the first run."""
    from apollo_compile import text

    graph, plan = compilation.partition.graph, compilation.plan
    measured = {span.segment: span.end_ns - span.start_ns for span in trace.spans}
    intervals = [(span.start_ns, span.end_ns) for span in trace.spans]
    num_units = len(plan.lanes[0].units)
    unit_time = sum(measured[s] * plan.assignments[s].quota.units for s in measured)
    return GraphSummary(
        name=graph.name,
        role=graph.role,
        origin=plan.origin,
        num_bodies=len(compilation.partition.bodies),
        num_lanes=len({assignment.lane for assignment in plan.assignments}),
        segments=tuple(
            SegmentSummary(
                name=graph.segments[assignment.segment].name,
                module=graph.segments[assignment.segment].module,
                lane=assignment.lane,
                units=assignment.quota.units,
                predicted_ns=assignment.duration_ns,
                source=_source(compilation, assignment.segment, assignment.quota.units),
                measured_ns=measured.get(assignment.segment),
            )
            for assignment in plan.in_start_order()
        ),
        predicted_ns=plan.makespan_ns,
        serial_ns=plan.serial_ns,
        bound_ns=plan.lower_bound_ns,
        gap=plan.gap,
        candidates=plan.candidates,
        baselines=_baselines(compilation),
        solver=plan.solver,
        seed=plan.seed,
        stopped_early=plan.stopped_early,
        pinned=plan.pinned,
        way=way,
        num_replans=num_replans,
        measured_ns=trace.duration_ns if trace.spans else None,
        overlap=_overlap_ns(intervals) / trace.duration_ns if trace.spans else None,
        busy=unit_time / (num_units * trace.duration_ns) if trace.spans else None,
        num_waits=len(compilation.syncs.waits),
        num_waits_dropped=len(compilation.syncs.dropped),
        peak_bytes=compilation.memory.peak_bytes,
        timeline=text.format_timeline(plan, trace if trace.spans else None),
    )


def _baselines(compilation: Compilation) -> tuple[tuple[str, int], ...]:
    problem = to_problem(compilation.partition.graph, compilation.costs, compilation.plan.lanes)
    return tuple((name, execute(problem, baseline(problem)).makespan) for name, baseline in BASELINES.items())


def _source(compilation: Compilation, segment: int, units: int) -> CostSource:
    return next(mode.source for mode in compilation.costs.modes[segment] if mode.units == units)


def _overlap_ns(intervals: Sequence[tuple[int, int]]) -> int:
    """Return for how long at least two intervals were open."""
    events: Iterable[tuple[int, int]] = sorted(
        [(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals],
        key=lambda event: (event[0], event[1]),
    )
    total = 0
    num_open = 0
    last = 0
    for time_ns, change in events:
        if num_open >= 2:
            total += time_ns - last
        num_open += change
        last = time_ns
    return total
