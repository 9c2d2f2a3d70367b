"""Data of a report: frozen plain values, which renderings show and do not compute.

    ModelSummary        all graphs of one model, fallbacks with reasons, verdicts, graph breaks, states
    GraphSummary        one FX graph: segments, modules, branches, lanes, waits, timelines, comparisons

They can be written as JSON and read back (`apollo_compile.json_form`); `check.py` checks their consistency, and
`summary.py` defines the numbers.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from apollo_compile.ir import Candidate, CostSource, GraphBreak, Origin, Role, Verdict


class Bottleneck(enum.StrEnum):
    """What takes most of a segment's time."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LAUNCH = "launch"
    WAITING = "waiting"


class Limit(enum.StrEnum):
    """What keeps any plan of a graph from being faster."""

    DEPENDENCIES = "dependencies"
    """The longest chain of segments, each on the number of units on which it is fastest."""
    UNITS = "units"
    """The total work of all segments, each on the number of units that it uses most efficiently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Duration of a segment on one number of units, without interference."""

    units: int
    duration_ns: int
    source: CostSource


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSummary:
    """One segment: its place in the plan, its predicted and its measured times."""

    id: int
    name: str
    module: str
    branch: str
    """Name of its branch."""
    lane: int
    units: int
    """Quota granted: units the segment may use; its lane has exactly these."""
    asked_units: int
    """Quota asked: the fewest units on which it is about as fast, alone, as on any number."""
    memory_bytes: int
    """Quota of bytes: bytes that it allocates."""
    predicted_ns: int
    """Duration in the plan, with interference."""
    source: CostSource
    measured_ns: int | None
    """None before the first run."""
    waited_ns: int
    """Idle time of the units of its lane before it, measured if it ran, else predicted."""
    bottleneck: Bottleneck
    memory_share: float
    launch_share: float
    choices: tuple[Choice, ...]
    after: tuple[int, ...]
    """Segments that it depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSummary:
    """One module: all segments whose work is mostly that of the module; layers of a list are one module."""

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
    """Indices of the modules that it reads from, without itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSummary:
    """Two branches, and for how long they overlap."""

    first: str
    second: str
    """Equal to `first` for the overlap of segments of one branch."""
    could_overlap_ns: int
    """The most that dependencies allow; 0 if all segments of one depend on all of the other."""
    overlap_ns: int
    """Measured if there was a run, else predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSummary:
    """One lane of the catalogue."""

    id: int
    units: tuple[int, ...]
    num_segments: int
    predicted_ns: int
    """Time in which it is busy."""
    measured_ns: int | None
    peak_bytes: int
    """Planned peak of the buffers that its segments make."""
    taken_bytes: int | None = None
    """Device memory that it took when its CUDA graph was captured; None before, and on a CPU."""
    quota_bytes: int | None = None
    """Limit of device memory that it may take; None is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSummary:
    """A dependency between two lanes."""

    producer: int
    consumer: int
    kept: bool
    """False if lane order and other waits imply it."""


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
    """All segments over time, in the serial plan, the plan, or a run."""

    name: Literal["serial", "predicted", "measured"]
    duration_ns: int
    overlap: float
    """Share of the duration in which at least two lanes are busy."""
    busy: float
    """Share of units x duration in which a lane of the unit is busy."""
    bars: tuple[Bar, ...]
    """By start."""
    units: tuple[tuple[int, int], ...]
    """Busy units over time: (nanoseconds, units) at every change."""
    memory: tuple[tuple[int, int], ...]
    """Bytes of buffers between segments over time, likewise; empty for the serial plan."""
    memory_by_lane: tuple[tuple[tuple[int, int], ...], ...] = ()
    """By lane, the same for buffers that segments of the lane make."""

    @property
    def idle_ns(self) -> int:
        """Time in which no lane is busy."""
        steps = [Step(0, 0), *itertools.starmap(Step, self.units), Step(self.duration_ns, 0)]
        return sum(later.time_ns - now.time_ns for now, later in itertools.pairwise(steps) if now.value == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Predicted times on another device or with another batch size."""

    change: str
    """What is changed, in words, e.g. `4 units`."""
    units: int
    serial_ns: int
    predicted_ns: int
    num_abreast: int
    """The largest number of segments that run at once in the plan."""
    batch: int | None = None
    """The number of samples, if that is what differs."""

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
    """Where its profile comes from: see `apollo_compile.device.profile`."""
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
    """Pairs of branches, by descending possible overlap."""
    lanes: tuple[LaneSummary, ...]
    waits: tuple[WaitSummary, ...]
    timelines: tuple[Timeline, ...]
    """Serial, predicted, and measured if there was a run."""
    predicted_ns: int
    serial_ns: int
    """Predicted makespan on one lane."""
    bound_ns: int
    gap: float
    """How far the plan is above the bound, without interference: with 0.02, it is at most 2 % above the optimum."""
    critical_path_ns: int
    """The longest chain of segments, each on the number of units on which it is fastest."""
    limit: Limit
    candidates: tuple[Candidate, ...]
    """Schedules that the planner considered, in order."""
    solver: str | None
    seed: int
    stopped_early: bool
    """Whether the time limit ended the search."""
    pinned: bool
    """Whether the plan was read from a file."""
    variant: str
    """The variant that runs now: see `apollo_compile.session.autotune`."""
    num_replans: int
    """Number of replans from measured durations."""
    peak_bytes: int
    """Planned peak of buffers between segments."""
    memory_quota: int | None
    what_if: tuple[WhatIf, ...] = ()
    without_formula: tuple[str, ...] = ()
    """Operators whose work is their bytes alone."""
    is_deterministic: bool = False
    """Whether measurements do not change the plan, since the user wants the same numbers every time."""
    is_cold: bool = False
    """Whether the plan runs but has no measurement yet: its first call is cold and not measured."""

    @property
    def measured(self) -> Timeline | None:
        """The last run; None before the second run, since the first is cold."""
        return next((line for line in self.timelines if line.name == "measured"), None)

    @property
    def predicted(self) -> Timeline:
        """The predicted timeline of the plan, or the serial one if there is no other."""
        return next((line for line in self.timelines if line.name == "predicted"), self.timelines[0])

    @property
    def latest(self) -> Timeline:
        """The last run, or the prediction before the first measured run."""
        return self.timelines[-1]

    @property
    def gain(self) -> float:
        """Serial time over predicted time."""
        return _ratio(self.serial_ns, self.predicted_ns)

    @property
    def possible_gain(self) -> float:
        """Serial time over the bound: an upper limit of the gain of any plan."""
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
        """Return the predicted overlap of two branches, or of a branch with itself."""
        first, second = (
            [bar for bar in self.predicted.bars if bar.segment in members]
            for members in ({s.id for s in self.segments if s.branch == name} for name in (pair.first, pair.second))
        )
        return total_overlap_ns(first, first if pair.first == pair.second else second)

    def time_by_bottleneck(self) -> dict[Bottleneck, int]:
        """Return the predicted time of the segments with each bottleneck."""
        found = dict.fromkeys(Bottleneck, 0)
        for segment in self.segments:
            found[segment.bottleneck] += segment.predicted_ns
        return found


class Stage(enum.StrEnum):
    """Stage of a Dynamo graph."""

    PLANNED = "planned"
    """Planned only, in a dry run."""
    MEASURING = "measuring"
    """Its variant may still change."""
    FALLS_BACK = "falls back"
    """Inductor runs all of it."""
    SETTLED = "settled"
    """Its variant is final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Stage of a Dynamo graph, with details."""

    graph: str
    stage: Stage
    detail: str = ""
    """Progress of the measurement, or the reason of the fallback."""
    round: str = ""
    """The round that a comparison is in, as in `3/12`."""

    def __str__(self) -> str:
        stage = f"{self.stage} {self.round}" if self.round else self.stage
        return f"{stage}: {self.detail}" if self.detail else stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """All graphs of one model."""

    graphs: tuple[GraphSummary, ...]
    fallbacks: tuple[tuple[str, str], ...]
    """Graphs that Inductor runs whole, and why."""
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    """By name of the Dynamo graph, the result of its comparison."""
    breaks: tuple[GraphBreak, ...] = ()
    fragments: str = ""
    """Where a call fell into many graphs: into how many, the main reason, and what to compile instead."""
    states: tuple[State, ...] = ()
    """Of every Dynamo graph; empty if unknown."""


def total_overlap_ns(one: Sequence[Bar], other: Sequence[Bar]) -> int:
    """Return the summed overlap of bars of two branches, or of one branch if `one is other`."""
    pairs = itertools.combinations(one, 2) if one is other else itertools.product(one, other)
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in pairs)


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
