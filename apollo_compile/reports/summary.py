"""Every number of a report, computed once.

    (Compilation, Trace) -> GraphSummary

Renderings format these values and compute none of their own. Summaries are plain frozen data, so a report can be
written as JSON and read back (`apollo_compile.json_form`).

A segment's bottleneck is the largest part of its predicted time: arithmetic (`compute`), bytes (`memory`) or fixed
times (`launch`); it is `waiting` where the units of its lane stood idle before it for longer than it runs.

A segment asks for as many units as make it fast: the fewest on which it takes, alone, at most `ASKED_TOLERANCE` longer
than on any other number. What it is granted are the units of its lane.

Two branches are independent as far as their segments are: neither reads, directly or through others, what the other
makes. `could_overlap_ns` is the time that the one with less such work spends on it, so it is the most that both can run
side by side. A branch is also a pair with itself, as where gradients of weights are independent of what goes on: then
it is half of the time of the segments that are independent of others of their branch.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from apollo_compile.ir import Candidate, CostSource, Lane, LaneId, Mode, Origin, Role, SegmentGraph, Trace, Variant
from apollo_compile.passes.plan import to_problem
from apollo_compile.pipeline import Compilation
from apollo_compile.planner.baselines import BASELINES
from apollo_compile.planner.simulate import execute

ASKED_TOLERANCE = 0.02

BRANCH_SHARE = 0.9
"""Branches are names as short as possible, so long as no branch has more than this share of the time."""

MAX_BRANCHES = 8

WITHOUT_MODULE = "(no module)"


class Bottleneck(enum.StrEnum):
    """What a segment spends most of its time on, or with."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LAUNCH = "launch"
    WAITING = "waiting"


class Limit(enum.StrEnum):
    """What keeps any plan of a graph from being faster."""

    DEPENDENCIES = "dependencies"
    """The longest chain of segments, each as fast as it can be."""
    UNITS = "units"
    """The work of all segments, each on the number of units that it uses best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a segment takes, alone, on one number of units."""

    units: int
    duration_ns: int
    source: CostSource


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSummary:
    """One segment: where it ran, what was expected and what was seen."""

    id: int
    name: str
    module: str
    branch: str
    """Name of its branch."""
    lane: int
    units: int
    """Quota granted: units the segment may use; its lane has exactly these."""
    asked_units: int
    """Quota asked: the fewest units on which it is as fast, alone, as it can be."""
    memory_bytes: int
    """Quota of bytes: what it allocates."""
    predicted_ns: int
    """In the plan, what neighbours cost included."""
    source: CostSource
    measured_ns: int | None
    """None before the first run."""
    waited_ns: int
    """How long the units of its lane stand idle before it, measured if it ran, else predicted."""
    bottleneck: Bottleneck
    memory_share: float
    launch_share: float
    choices: tuple[Choice, ...]
    after: tuple[int, ...]
    """Segments that it depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSummary:
    """One module: all segments whose work is mostly its own, layers of a list together."""

    name: str
    branch: str
    num_segments: int
    lanes: tuple[int, ...]
    predicted_ns: int
    """Sum over its segments, as the plan runs them."""
    serial_ns: int
    """Sum over its segments on all units."""
    measured_ns: int | None
    after: tuple[int, ...]
    """Indices of the modules that it reads from, itself left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSummary:
    """Two branches, and how much of them runs side by side."""

    first: str
    second: str
    """The same as the first for segments of one branch beside each other."""
    could_overlap_ns: int
    """At most, as dependencies go; 0 where one of them needs what the other makes, from end to start."""
    overlap_ns: int
    """Measured if there was a run, else predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSummary:
    """One lane of the catalogue."""

    id: int
    units: tuple[int, ...]
    num_segments: int
    predicted_ns: int
    """For how long it is at work."""
    measured_ns: int | None
    peak_bytes: int
    """Planned peak of the buffers that its segments make."""
    taken_bytes: int | None = None
    """Device memory that it took when its CUDA graph was captured; None on a CPU, and before."""
    quota_bytes: int | None = None
    """The most that it may take; None is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSummary:
    """A dependency between two lanes."""

    producer: int
    consumer: int
    kept: bool
    """False where the order of lanes and other waits imply it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One segment on a timeline."""

    segment: int
    lane: int
    start_ns: int
    end_ns: int


class Step(NamedTuple):
    """From this time on, a counter has this value."""

    time_ns: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All segments over time, one way to run them."""

    name: Literal["serial", "predicted", "measured"]
    duration_ns: int
    overlap: float
    """Share of the duration in which at least two lanes are at work."""
    busy: float
    """Share of unit-time, over all units and the duration, in which a lane that has the unit is at work."""
    bars: tuple[Bar, ...]
    """By start."""
    units: tuple[tuple[int, int], ...]
    """Units at work over time: (nanoseconds, units) at every change."""
    memory: tuple[tuple[int, int], ...]
    """Bytes of buffers between segments over time, likewise; empty for the serial plan."""
    memory_by_lane: tuple[tuple[tuple[int, int], ...], ...] = ()
    """The same of the buffers that segments of one lane make, by lane."""

    @property
    def idle_ns(self) -> int:
        """For how long no lane is at work."""
        steps = [Step(0, 0), *itertools.starmap(Step, self.units), Step(self.duration_ns, 0)]
        return sum(later.time_ns - now.time_ns for now, later in itertools.pairwise(steps) if now.value == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What another device or batch would give."""

    change: str
    """In words, e.g. `4 units`."""
    units: int
    serial_ns: int
    predicted_ns: int
    batch: int | None = None
    """The number of samples, where that is what differs."""

    @property
    def gain(self) -> float:
        """Serial time over predicted time."""
        return _ratio(self.serial_ns, self.predicted_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSummary:
    """The device that a graph was planned for."""

    kind: str
    name: str
    source: str
    """How its profile came about: see `apollo_compile.device.profile`."""
    units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """One FX graph."""

    name: str
    role: Role
    origin: Origin
    device: DeviceSummary
    num_bodies: int
    num_lanes: int
    """Lanes that the plan uses."""
    segments: tuple[SegmentSummary, ...]
    """In planned start order."""
    modules: tuple[ModuleSummary, ...]
    """In graph order."""
    branches: tuple[str, ...]
    pairs: tuple[PairSummary, ...]
    """Of branches, those that could overlap longest first."""
    lanes: tuple[LaneSummary, ...]
    waits: tuple[WaitSummary, ...]
    timelines: tuple[Timeline, ...]
    """Serial, predicted, and measured if there was a run."""
    predicted_ns: int
    serial_ns: int
    """Predicted makespan on one lane."""
    bound_ns: int
    gap: float
    """How far the plan, undisturbed by interference, can be from the best one: 0.02 is at most 2 % above it."""
    critical_path_ns: int
    """The longest chain of segments, each on the number of units on which it is fastest."""
    limit: Limit
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
    """How it runs now: see `apollo_compile.session.autotune`."""
    num_replans: int
    """How often it was planned again from measured durations."""
    peak_bytes: int
    """Planned peak of buffers between segments."""
    memory_quota: int | None
    what_if: tuple[WhatIf, ...] = ()
    without_formula: tuple[str, ...] = ()
    """Operators whose work is counted by their bytes alone."""
    is_deterministic: bool = False
    """Whether the plan stays whatever is measured, since the user wants the same numbers every time."""
    is_cold: bool = False
    """Whether there is no measurement yet though it is to run: the first call of a plan is none."""

    @property
    def measured(self) -> Timeline | None:
        """The last run; None before the second, since the first is cold."""
        return next((line for line in self.timelines if line.name == "measured"), None)

    @property
    def predicted(self) -> Timeline:
        """What is predicted of the plan, or of one lane where that is all there is."""
        return next((line for line in self.timelines if line.name == "predicted"), self.timelines[0])

    @property
    def latest(self) -> Timeline:
        """The last run, or what is predicted of it."""
        return self.timelines[-1]

    @property
    def gain(self) -> float:
        """Serial time over predicted time."""
        return _ratio(self.serial_ns, self.predicted_ns)

    @property
    def possible_gain(self) -> float:
        """Serial time over the bound: no plan gains more."""
        return _ratio(self.serial_ns, self.bound_ns)

    @property
    def compares_batches(self) -> bool:
        """Whether other batch sizes are among the comparisons."""
        return any(row.batch is not None for row in self.what_if)

    @property
    def lanes_used(self) -> tuple[LaneSummary, ...]:
        """Lanes on which the plan has segments."""
        return tuple(lane for lane in self.lanes if lane.num_segments)

    @property
    def num_waits(self) -> int:
        """Waits between lanes that the program has."""
        return sum(wait.kept for wait in self.waits)

    @property
    def num_waits_dropped(self) -> int:
        """Dependencies between lanes that need no wait."""
        return len(self.waits) - self.num_waits

    def planned_overlap_ns(self, pair: PairSummary) -> int:
        """Return for how long two branches, or a branch with itself, are side by side as predicted."""
        first, second = (
            [bar for bar in self.predicted.bars if bar.segment in members]
            for members in ({s.id for s in self.segments if s.branch == name} for name in (pair.first, pair.second))
        )
        return _side_by_side_ns(first, first if pair.first == pair.second else second)

    def time_by_bottleneck(self) -> dict[Bottleneck, int]:
        """Return the predicted time of the segments with each bottleneck."""
        found = dict.fromkeys(Bottleneck, 0)
        for segment in self.segments:
            found[segment.bottleneck] += segment.predicted_ns
        return found


MAX_UNITS = 2**16
"""More than any device has; a report with larger numbers is damaged."""


def check_summary(graph: GraphSummary) -> None:
    """Refuse a summary that does not hang together: files have other writers than us. Raises `ValueError`."""
    ids, lanes = set(range(len(graph.segments))), {lane.id: lane.units for lane in graph.lanes}
    branches = {segment.branch for segment in graph.segments}
    for problem, is_legal in (
        ("segments must be numbered from 0", {segment.id for segment in graph.segments} == ids != set()),
        ("segments must depend on segments", all(set(segment.after) <= ids for segment in graph.segments)),
        ("waits must be between segments", all({wait.producer, wait.consumer} <= ids for wait in graph.waits)),
        ("modules must read from modules", _are_indices(graph.modules)),
        ("lanes must be numbered from 0", list(lanes) == list(range(len(graph.lanes))) != []),
        ("lanes must have units, ascending", all(_are_units(units) for units in lanes.values())),
        ("segments must be on lanes", {segment.lane for segment in graph.segments} <= set(lanes)),
        ("there must be timelines", bool(graph.timelines)),
        (
            "timelines must show segments and memory on lanes",
            all(_is_legal(line, ids, set(lanes)) for line in graph.timelines),
        ),
        ("every segment needs a choice for all units", all(_has_choices(s, graph.device) for s in graph.segments)),
        ("branches must be listed", branches | {m.branch for m in graph.modules} <= set(graph.branches)),
        ("pairs must be of branches", all({pair.first, pair.second} <= branches for pair in graph.pairs)),
    ):
        if not is_legal:
            raise ValueError(f"{graph.name}: {problem}")


def _are_indices(modules: Sequence[ModuleSummary]) -> bool:
    return all(0 <= other < len(modules) for module in modules for other in module.after)


def _are_units(units: Sequence[int]) -> bool:
    return len(units) > 0 and units[0] >= 0 and units[-1] < MAX_UNITS and list(units) == sorted(set(units))


def _is_legal(line: Timeline, segments: Set[int], lanes: Set[int]) -> bool:
    return (
        line.duration_ns >= 0
        and len(line.memory_by_lane) in (0, len(lanes))
        and all(
            bar.segment in segments and bar.lane in lanes and 0 <= bar.start_ns <= bar.end_ns <= line.duration_ns
            for bar in line.bars
        )
    )


def _has_choices(segment: SegmentSummary, device: DeviceSummary) -> bool:
    return device.units in {c.units for c in segment.choices} and min(c.duration_ns for c in segment.choices) > 0


def summarize(
    compilation: Compilation,
    trace: Trace,
    *,
    num_replans: int = 0,
    is_deterministic: bool = False,
    is_cold: bool = False,
    way: str = Variant.PLAN,
    what_if: tuple[WhatIf, ...] = (),
    lane_bytes: Mapping[LaneId, int] = types.MappingProxyType({}),
    lane_memory_quota: int | None = None,
) -> GraphSummary:
    """Return the numbers of one graph.

    Arguments:
        compilation: the graph and its plan.
        trace: of its plan, empty before the first run.
        num_replans: how often it was planned again.
        is_deterministic: whether it was not to be.
        is_cold: whether it is to run, and was not called often enough for a trace.
        way: how it runs now.
        what_if: what other devices or batches would give.
        lane_bytes: device memory that lanes took.
        lane_memory_quota: bytes of device memory that a lane may take; None where there is no limit.
    """
    graph, plan = compilation.partition.graph, compilation.plan
    branch_of = _branches(compilation)
    timelines = _timelines(compilation, trace)
    latest = timelines[-1]
    measured = {span.segment: span.end_ns - span.start_ns for span in trace.spans}
    waited = _waited(latest, plan.lanes)
    segments = tuple(
        _summarize_segment(
            compilation, a.segment, branch_of[a.segment], measured.get(a.segment), waited.get(a.segment, 0)
        )
        for a in plan.in_start_order()
    )
    critical_path_ns = _critical_path(graph, [min(_durations(modes)) for modes in compilation.costs.modes])
    profile = compilation.profile
    return GraphSummary(
        name=graph.name,
        role=graph.role,
        origin=plan.origin,
        device=DeviceSummary(kind=profile.kind, name=profile.name, source=profile.source, units=profile.units),
        num_bodies=len(compilation.partition.bodies),
        num_lanes=len({assignment.lane for assignment in plan.assignments}),
        segments=segments,
        modules=_summarize_modules(compilation, {segment.id: segment for segment in segments}),
        branches=tuple(dict.fromkeys(branch_of)),
        without_formula=compilation.capture.without_formula,
        pairs=_summarize_pairs(compilation, branch_of, latest),
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
        baselines=_baselines(compilation),
        solver=plan.solver,
        seed=plan.seed,
        stopped_early=plan.stopped_early,
        pinned=plan.pinned,
        way=way,
        num_replans=num_replans,
        peak_bytes=compilation.memory.peak_bytes,
        memory_quota=plan.memory_quota,
        what_if=what_if,
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
        choices=tuple(Choice(units=m.units, duration_ns=m.duration_ns, source=m.source) for m in modes),
        after=compilation.partition.graph.predecessors(segment.id),
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
    """Return for how long the units of its lane were idle before every segment."""
    free_at: dict[int, int] = defaultdict(int)
    waited = {}
    for bar in timeline.bars:
        units = lanes[bar.lane].units
        waited[bar.segment] = max(0, bar.start_ns - max(free_at[unit] for unit in units))
        for unit in units:
            free_at[unit] = bar.end_ns
    return waited


# -------------------------------------------------------------------------------------------- modules and branches


def _branches(compilation: Compilation) -> list[str]:
    """Return the branch of every segment: its module's name, cut so short that a few are left."""
    graph = compilation.partition.graph
    paths = [_path(segment.module) for segment in graph.segments]
    serial = [modes[-1].duration_ns for modes in compilation.costs.modes]
    best = ["(all)"] * len(paths)
    for depth in range(1, max(map(len, paths), default=0) + 1):
        names = [".".join(path[:depth]) or WITHOUT_MODULE for path in paths]
        time_by_name: dict[str, int] = defaultdict(int)
        for name, time_ns in zip(names, serial, strict=True):
            time_by_name[name] += time_ns
        if depth > 1 and len(time_by_name) > MAX_BRANCHES:
            break
        best = names
        if max(time_by_name.values()) <= BRANCH_SHARE * sum(serial):
            break
    return best


def _path(module: str) -> list[str]:
    """Return the parts of a module's name before the number of a layer."""
    return list(itertools.takewhile(lambda part: not part.isdecimal(), module.split("."))) if module else []


def _summarize_modules(compilation: Compilation, segments: Mapping[int, SegmentSummary]) -> tuple[ModuleSummary, ...]:
    names = [".".join(_path(segment.module)) or WITHOUT_MODULE for segment in compilation.partition.graph.segments]
    members: dict[str, list[SegmentSummary]] = defaultdict(list)
    for segment_id, name in enumerate(names):
        members[name].append(segments[segment_id])
    place = {name: index for index, name in enumerate(members)}
    found = []
    for name, own in members.items():
        before = {place[names[other]] for segment in own for other in segment.after} - {place[name]}
        measured = [segment.measured_ns for segment in own if segment.measured_ns is not None]
        found.append(
            ModuleSummary(
                name=name,
                branch=own[0].branch,
                num_segments=len(own),
                lanes=tuple(sorted({segment.lane for segment in own})),
                predicted_ns=sum(segment.predicted_ns for segment in own),
                serial_ns=sum(segment.choices[-1].duration_ns for segment in own),
                measured_ns=sum(measured) if measured else None,
                after=tuple(sorted(before)),
            )
        )
    return tuple(found)


def _summarize_pairs(compilation: Compilation, branch_of: Sequence[str], timeline: Timeline) -> tuple[PairSummary, ...]:
    graph = compilation.partition.graph
    related = _related(graph)
    fastest = [min(_durations(modes)) for modes in compilation.costs.modes]
    members: dict[str, int] = defaultdict(int)
    for segment, branch in enumerate(branch_of):
        members[branch] |= 1 << segment
    bars = {branch: [bar for bar in timeline.bars if branch_of[bar.segment] == branch] for branch in members}

    def independent_ns(one: str, other: str) -> int:
        return sum(
            fastest[segment]
            for segment, branch in enumerate(branch_of)
            if branch == one and members[other] & ~related[segment]
        )

    pairs = [
        PairSummary(
            first=first,
            second=second,
            could_overlap_ns=min(independent_ns(first, second), independent_ns(second, first))
            // (2 if first == second else 1),
            overlap_ns=_side_by_side_ns(bars[first], bars[second]),
        )
        for first, second in itertools.combinations_with_replacement(members, 2)
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.could_overlap_ns))


def _side_by_side_ns(one: Sequence[Bar], other: Sequence[Bar]) -> int:
    """Return for how long bars of one branch are beside those of another; the same bars are a branch with itself."""
    beside = itertools.combinations(one, 2) if one is other else itertools.product(one, other)
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in beside)


def _related(graph: SegmentGraph) -> list[int]:
    """Return, per segment, the set of segments that it needs or that need it, and itself, as bits."""
    before = [0] * len(graph.segments)
    related = [0] * len(graph.segments)
    for segment in graph.segments:
        before[segment.id] = functools.reduce(
            lambda found, other: found | before[other] | 1 << other, graph.predecessors(segment.id), 0
        )
        related[segment.id] |= before[segment.id] | 1 << segment.id
        for other in range(segment.id):
            if before[segment.id] >> other & 1:
                related[other] |= 1 << segment.id
    return related


# ------------------------------------------------------------------------------------------------------- timelines


def _timelines(compilation: Compilation, trace: Trace) -> tuple[Timeline, ...]:
    plan = compilation.plan
    ends = list(itertools.accumulate(modes[-1].duration_ns for modes in compilation.costs.modes))
    serial = [
        Bar(segment=segment, lane=0, start_ns=start_ns, end_ns=end_ns)
        for segment, (start_ns, end_ns) in enumerate(itertools.pairwise([0, *ends]))
    ]
    planned = [Bar(segment=a.segment, lane=a.lane, start_ns=a.start_ns, end_ns=a.end_ns) for a in plan.in_start_order()]
    found = [
        _timeline("serial", serial, plan.serial_ns, compilation),
        _timeline("predicted", planned, plan.makespan_ns, compilation),
    ]
    if trace.spans:
        ran = [Bar(segment=s.segment, lane=s.lane, start_ns=s.start_ns, end_ns=s.end_ns) for s in trace.spans]
        found.append(_timeline("measured", ran, trace.duration_ns, compilation))
    return tuple(found)


def _timeline(
    name: Literal["serial", "predicted", "measured"], bars: Sequence[Bar], duration_ns: int, compilation: Compilation
) -> Timeline:
    lanes = compilation.plan.lanes
    width = [len(lane.units) for lane in lanes]
    unit_time = sum((bar.end_ns - bar.start_ns) * width[bar.lane] for bar in bars)
    lanes_at_work = _steps([(bar.start_ns, bar.end_ns, 1) for bar in bars])
    overlap_ns = sum(later.time_ns - now.time_ns for now, later in itertools.pairwise(lanes_at_work) if now.value >= 2)
    held = {} if name == "serial" else _lifetimes(compilation, bars, duration_ns)
    return Timeline(
        name=name,
        duration_ns=duration_ns,
        overlap=overlap_ns / duration_ns if duration_ns else 0.0,
        busy=unit_time / (width[0] * duration_ns) if duration_ns else 0.0,
        bars=tuple(bars),
        units=_plain(_steps([(bar.start_ns, bar.end_ns, width[bar.lane]) for bar in bars])),
        memory=_plain(_steps(itertools.chain.from_iterable(held.values()))),
        memory_by_lane=tuple(_plain(_steps(held[lane.id])) for lane in lanes) if held else (),
    )


def _lifetimes(
    compilation: Compilation, bars: Sequence[Bar], duration_ns: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Return (start, end, bytes) of every buffer that a segment of each lane makes, as the memory plan holds it."""
    times = {bar.segment: bar for bar in bars}
    holder = {hold.buffer: hold.segment for hold in compilation.memory.holds}
    found: dict[int, list[tuple[int, int, int]]] = {lane.id: [] for lane in compilation.plan.lanes}
    for buffer in compilation.partition.graph.buffers:
        if buffer.producer in times:
            made, last = times[buffer.producer], times.get(holder.get(buffer.id, -1))
            end_ns = last.end_ns if last else duration_ns
            found[made.lane].append((made.start_ns, end_ns, buffer.num_bytes))
    return found


def _steps(intervals: Iterable[tuple[int, int, int]]) -> list[Step]:
    """Return the sum of the values of the open intervals (start, end, value), at every change."""
    changes: dict[int, int] = defaultdict(int)
    for start_ns, end_ns, value in intervals:
        changes[start_ns] += value
        changes[end_ns] -= value
    level = 0
    found: list[Step] = []
    for time_ns in sorted(changes):
        level += changes[time_ns]
        if not found or found[-1].value != level:
            found.append(Step(time_ns, level))
    return found


def _plain(steps: Iterable[Step]) -> tuple[tuple[int, int], ...]:
    return tuple((step.time_ns, step.value) for step in steps)


# ---------------------------------------------------------------------------------------------------------- limits


def _critical_path(graph: SegmentGraph, durations: Sequence[int]) -> int:
    ends: list[int] = []
    for segment in graph.segments:
        start = max((ends[other] for other in graph.predecessors(segment.id)), default=0)
        ends.append(start + durations[segment.id])
    return max(ends, default=0)


def _load(compilation: Compilation) -> float:
    """Return how long all units would be at work if every segment had the number of units that it uses best."""
    units = len(compilation.plan.lanes[0].units)
    return sum(min(mode.units * mode.duration_ns for mode in modes) for modes in compilation.costs.modes) / units


def _baselines(compilation: Compilation) -> tuple[tuple[str, int], ...]:
    problem = to_problem(compilation.partition.graph, compilation.costs, compilation.plan.lanes)
    return tuple((name, execute(problem, baseline(problem)).makespan) for name, baseline in BASELINES.items())


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
