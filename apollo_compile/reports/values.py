"""What a report holds: frozen plain data, which every rendering lays out and none computes.

    ModelSummary        all graphs of one model, what Inductor runs and why, verdicts, graph breaks, states
    GraphSummary        one FX graph: segments, modules, branches, lanes, waits, timelines, comparisons

They can be written as JSON and read back (`apollo_compile.json_form`), and `check.py` says whether they hang together.
`summary.py` says what the numbers mean.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from apollo_compile.ir import Candidate, CostSource, GraphBreak, Origin, Role, Verdict


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
    variant: str
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
        return side_by_side_ns(first, first if pair.first == pair.second else second)

    def time_by_bottleneck(self) -> dict[Bottleneck, int]:
        """Return the predicted time of the segments with each bottleneck."""
        found = dict.fromkeys(Bottleneck, 0)
        for segment in self.segments:
            found[segment.bottleneck] += segment.predicted_ns
        return found


class Stage(enum.StrEnum):
    """How far it is with a Dynamo graph."""

    PLANNED = "planned"
    """It was not to run."""
    MEASURING = "measuring"
    """What runs it may still change."""
    FALLS_BACK = "falls back"
    """Inductor runs all of it."""
    SETTLED = "settled"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """How far it is with a Dynamo graph, and where in that."""

    graph: str
    stage: Stage
    detail: str = ""
    """What was measured so far, or why it falls back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """All graphs of one model."""

    graphs: tuple[GraphSummary, ...]
    fallbacks: tuple[tuple[str, str], ...]
    """Graphs that Inductor runs whole, and why."""
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    """By name of the Dynamo graph, which way of running it was the fastest."""
    breaks: tuple[GraphBreak, ...] = ()
    states: tuple[State, ...] = ()
    """Of every Dynamo graph; empty where nobody knows."""


def side_by_side_ns(one: Sequence[Bar], other: Sequence[Bar]) -> int:
    """Return for how long bars of one branch are beside those of another; the same bars are a branch with itself."""
    beside = itertools.combinations(one, 2) if one is other else itertools.product(one, other)
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in beside)


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
