"""Data of a report: frozen plain values that renderings show.

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

from apollo_compile.ir import CostSource, GraphBreak, Origin, RankedSchedule, Role, Verdict
from apollo_compile.ir.text import format_count
from apollo_compile.units import format_roughly

MAX_NAMES = 3
"""Number of modules that the title of a segment names."""


class Bottleneck(enum.StrEnum):
    """Largest part of a segment's time."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LAUNCH = "launch"
    WAITING = "waiting"


class Limit(enum.StrEnum):
    """Reason of the lower bound of all plans of a graph."""

    DEPENDENCIES = "dependencies"
    """The longest chain of segments, each on the number of units on which it is fastest."""
    UNITS = "units"
    """The total work of all segments, each on the number of units that it uses most efficiently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDuration:
    """Duration of a segment on one number of units, without interference."""

    units: int
    duration_ns: int
    source: CostSource


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSummary:
    """One segment with its assignment and its predicted and measured times."""

    id: int
    name: str
    module: str
    branch: str
    lane: int
    units: int
    """Granted quota: number of units of its lane."""
    asked_units: int
    """Requested quota: the smallest number of units on which it is about as fast, alone, as on any number."""
    memory_bytes: int
    """Quota of bytes that it allocates."""
    predicted_ns: int
    """Duration in the plan, with interference."""
    source: CostSource
    measured_ns: int | None
    """Measured duration; None before the first run."""
    waited_ns: int
    """Idle time of the units of its lane before it, measured if it ran, else predicted."""
    bottleneck: Bottleneck
    memory_share: float
    launch_share: float
    choices: tuple[UnitDuration, ...]
    after: tuple[int, ...]
    """Segments that it depends on."""
    others: tuple[str, ...] = ()
    """Modules with an operation in the segment, besides its own module and submodules of that."""

    @property
    def title(self) -> str:
        """Name with the other modules that it holds: `vision.embeddings + pre_layernorm`, `matmul (no module)`.

        Modules around its own are left out, and so is the part of a name that it shares with the one before.
        """
        others = [other for other in self.others if not f"{self.module}.".startswith(f"{other}.")]
        shown = [self.name if self.module else f"{self.name.removeprefix('~')} (no module)"]
        shown += itertools.starmap(_without_shared, itertools.pairwise([self.module, *others]))
        more = f" + {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else ""
        return " + ".join(shown[:MAX_NAMES]) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSummary:
    """One module: all segments whose work is mostly the module's; the layers of a list are one module."""

    name: str
    branch: str
    num_segments: int
    lanes: tuple[int, ...]
    predicted_ns: int
    """Sum of its segments' durations in the plan."""
    serial_ns: int
    """Sum of its segments' durations on all units."""
    measured_ns: int | None
    after: tuple[int, ...]
    """Indices of the modules that it reads from, without itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSummary:
    """Two branches, and the duration of their overlap."""

    first: str
    second: str
    """Equal to `first` for the overlap of segments of one branch."""
    could_overlap_ns: int
    """Largest overlap that dependencies allow; 0 if all segments of one branch depend on all of the other."""
    overlap_ns: int
    """Overlap, measured if there was a run, else predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSummary:
    """One lane of the catalogue."""

    id: int
    units: tuple[int, ...]
    num_segments: int
    predicted_ns: int
    """Time in which the lane is busy."""
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
class SegmentBar:
    """One segment on a timeline."""

    segment: int
    lane: int
    start_ns: int
    end_ns: int


class CounterChange(NamedTuple):
    """Value of a counter from a time on."""

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
    bars: tuple[SegmentBar, ...]
    """Bars by start."""
    units: tuple[tuple[int, int], ...]
    """Busy units over time: (nanoseconds, units) at every change."""
    memory: tuple[tuple[int, int], ...]
    """Bytes of buffers between segments over time: (nanoseconds, bytes) at every change; empty for the serial plan."""
    memory_by_lane: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Per lane, `memory` of the buffers that segments of the lane make."""

    @property
    def idle_ns(self) -> int:
        """Time in which no lane is busy."""
        start, end = CounterChange(0, 0), CounterChange(self.duration_ns, 0)
        steps = [start, *itertools.starmap(CounterChange, self.units), end]
        return sum(later.time_ns - now.time_ns for now, later in itertools.pairwise(steps) if now.value == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSummary:
    """The device that a graph was planned for."""

    kind: str
    name: str
    source: str
    """Source of its profile: see `apollo_compile.target.profile`."""
    units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EnsembleSummary:
    """Independent segments that run the same code."""

    names: tuple[str, ...]
    apart_ns: int
    """Least time that they take side by side, from formulas."""
    batched_ns: int
    """Time of one batched call in their place, on all units."""


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
    """Segments in planned start order."""
    modules: tuple[ModuleSummary, ...]
    """Modules in graph order."""
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
    """Relative distance of the plan from the bound, without interference; 0.02 means at most 2 % above the optimum."""
    critical_path_ns: int
    """Length of the longest chain of segments, each on the number of units on which it is fastest."""
    limit: Limit
    candidates: tuple[RankedSchedule, ...]
    """Schedules that the planner considered, in order."""
    solver: str | None
    seed: int
    stopped_early: bool
    """Whether the time limit ended the search."""
    pinned: bool
    """Whether the plan was read from a file."""
    variant: str
    """The variant that runs now: see `apollo_compile.ir.variants`."""
    num_replans: int
    """Number of replans from measured durations."""
    peak_bytes: int
    """Planned peak of buffers between segments."""
    memory_quota: int | None
    ensembles: tuple[EnsembleSummary, ...] = ()
    """Equal segments that one batched call could replace."""
    without_formula: tuple[str, ...] = ()
    """Operators whose work is their bytes alone."""
    is_deterministic: bool = False
    """Whether measurements do not change the plan, because deterministic algorithms are enabled."""
    is_cold: bool = False
    """Whether the plan runs but is not measured yet, because its first call is cold."""

    @property
    def measured(self) -> Timeline | None:
        """Timeline of the last run; None before the second run, since the first is cold."""
        return next((line for line in self.timelines if line.name == "measured"), None)

    @property
    def predicted(self) -> Timeline:
        """Predicted timeline of the plan; the serial timeline if there is no other."""
        return next((line for line in self.timelines if line.name == "predicted"), self.timelines[0])

    @property
    def latest(self) -> Timeline:
        """Timeline of the last run; the prediction before the first measured run."""
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
    def lanes_used(self) -> tuple[LaneSummary, ...]:
        """Lanes on which the plan has segments."""
        return tuple(lane for lane in self.lanes if lane.num_segments)

    @property
    def num_waits(self) -> int:
        """Number of waits between lanes in the program."""
        return sum(wait.kept for wait in self.waits)

    @property
    def num_waits_dropped(self) -> int:
        """Number of dependencies between lanes that need no wait."""
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
    """Planned only, in a dry run, without a prediction of the time of `torch.compile`."""
    WOULD_HELP = "would help"
    WOULD_HARDLY_HELP = "would hardly help"
    """Planned only; the details have the predicted speed-up."""
    MEASURING = "measuring"
    """Its variant may still change."""
    FALLS_BACK = "falls back"
    """Inductor compiles the whole graph."""
    SETTLED = "settled"
    """Its variant is final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Stage of a Dynamo graph, with details."""

    graph: str
    stage: Stage
    detail: str = ""
    """Times until now, the result, or the reason of the fallback."""
    num_steps: int = 0
    """Steps in which it was settled, or that measuring still takes, about; 0 if unknown."""
    left_ns: int = 0
    """About how long measuring still takes; 0 if unknown."""

    @property
    def progress(self) -> str:
        """The stage and its steps: `measuring, about 60 steps (20 s) left`, `settled after 128 measured steps`."""
        if self.num_steps and self.stage is Stage.SETTLED:
            return f"{self.stage} after {format_count(self.num_steps, 'measured step')}"
        if self.num_steps and self.stage is Stage.MEASURING:
            time = f" ({format_roughly(self.left_ns)})" if self.left_ns else ""
            return f"{self.stage}, about {format_count(self.num_steps, 'step')}{time} left"
        return self.stage

    def __str__(self) -> str:
        return f"{self.progress}: {self.detail}" if self.detail else self.progress


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """All graphs of one model."""

    graphs: tuple[GraphSummary, ...]
    fallbacks: tuple[tuple[str, str], ...]
    """Graphs that fall back to Inductor, with reasons."""
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    """Names of Dynamo graphs, with the results of their comparisons."""
    breaks: tuple[GraphBreak, ...] = ()
    fragments: str = ""
    """Note on a call that was split into many graphs: their number, the main reason, and a suggestion."""
    states: tuple[State, ...] = ()
    """States of all Dynamo graphs; empty if unknown."""


def total_overlap_ns(one: Sequence[SegmentBar], other: Sequence[SegmentBar]) -> int:
    """Return the summed overlap of bars of two branches, or of one branch if `one is other`."""
    pairs = itertools.combinations(one, 2) if one is other else itertools.product(one, other)
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in pairs)


def _without_shared(before: str, name: str) -> str:
    """Return the name of a module without the parts that it begins with as the other does; a number keeps its list."""
    parts = name.split(".")
    shared = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before.split("."), parts, strict=False))
    )
    first = min(shared, len(parts) - 1)
    return ".".join(parts[first - (first > 0 and parts[first].isdecimal()) :])


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
