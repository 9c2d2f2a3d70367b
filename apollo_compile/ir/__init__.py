"""Every product of the compiler: frozen values that one stage makes and later stages read.

variants.py the variants of a graph, and the verdict of autotuning
check       legality checks of products, by other algorithms than those of the stages
text.py     products as text, for people and for `APOLLO_DUMP`

    Capture -> Partition (SegmentGraph + bodies) -> CostTable -> Plan -> SyncPlan -> MemoryPlan -> Program
    running a Program gives a Trace; traces give Observations, which feed the next CostTable

No product refers to torch. Times are integers of nanoseconds (`_ns`), sizes integers of bytes (`_bytes`).
Ids are positions: `graph.segments[s].id == s`, `graph.buffers[b].id == b`, `plan.lanes[l].id == l`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NewType

from apollo_compile.ir.variants import MIN_ROUNDS as MIN_ROUNDS
from apollo_compile.ir.variants import Standing as Standing
from apollo_compile.ir.variants import Variant as Variant
from apollo_compile.ir.variants import Verdict as Verdict

NodeId = NewType("NodeId", int)
SegmentId = NewType("SegmentId", int)
BodyId = NewType("BodyId", int)
BufferId = NewType("BufferId", int)
LaneId = NewType("LaneId", int)
EventId = NewType("EventId", int)


class Role(enum.StrEnum):
    """Role of a graph in its model."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"
    STEP = "step"
    """Forward and backward in one graph: a function that calls `backward` itself."""


class Phase(enum.StrEnum):
    """Parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """Operations on gradients: sums over micro-batches, clipping, the optimizer."""


class KernelKind(enum.StrEnum):
    """Kinds of kernels that differ in speed."""

    LOOP = "loop"
    """A fused loop: pointwise operators, reductions, copies, gathers."""
    MATMUL = "matmul"
    BATCHED_MATMUL = "batched matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution backward"
    SCATTER = "scatter"
    """A loop that adds at addresses it reads: not vectorized, with atomic additions."""
    LIBRARY = "library"
    """Sorts, scans, searches, and all other library calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel of a segment, or several equal ones; flops, bytes and tiles are those of one."""

    kind: KernelKind = KernelKind.LOOP
    dtype: str = "float32"
    """Type of the operands."""
    flops: int = 0
    bytes_moved: int = 0
    """Bytes read and written."""
    bytes_from_outside: int = 0
    """Part of `bytes_moved` that is read from buffers of earlier segments, which are no longer in a near cache."""
    tiles: int = 0
    """Output tiles of 128 x 128 of a GEMM, which a GPU distributes over its units; 0 for a loop."""
    launches: int = 1
    """Kernels that the library launches for it, in sequence: one per gradient of a convolution, for example."""
    count: int = 1
    """Number of equal kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Amount of work of a node or segment, independent of the device."""

    flops: int = 0
    """Floating point operations; a multiply-add counts as two."""
    bytes_read: int = 0
    bytes_written: int = 0
    kernels: int = 0
    """Kernels launched, after predicted fusion."""
    parts: tuple[Kernel, ...] = ()
    """The kernels, equal ones together, in order of first use; empty where only the totals are known."""

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            kernels=self.kernels + other.kernels,
            parts=merge_kernels((*self.parts, *other.parts)),
        )


def merge_kernels(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Return the kernels with equal ones counted, in order of first use."""
    counts: dict[Kernel, int] = {}
    for kernel in kernels:
        one = replace(kernel, count=1)
        counts[one] = counts.get(one, 0) + kernel.count
    return tuple(replace(kernel, count=count) for kernel, count in counts.items())


# ---------------------------------------------------------------------------------------------- stage 0: capture


class NodeKind(enum.StrEnum):
    """Kinds of FX nodes that the partition treats differently."""

    INPUT = "input"
    """A graph input; belongs to no segment."""
    COMPUTE = "compute"
    """Work to place on a lane; belongs to exactly one segment."""
    PROJECTION = "projection"
    """Projection of one output of a node that has several; it always stays in that node's segment."""
    CHEAP = "cheap"
    """A view, a constant factory or index arithmetic: may be cloned into every segment that uses it."""
    PART = "part"
    """A view of one of several equal parts of a value: made where the value is made, and once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of the FX graph, reduced to the data that later stages need."""

    id: NodeId
    name: str
    kind: NodeKind
    target: str
    """Operator, e.g. `aten.mm.default`; the placeholder's name for inputs."""
    inputs: tuple[NodeId, ...]
    """Nodes whose values this one reads, without repeats, in order of the arguments; `sizes` are not among them."""
    sizes: tuple[NodeId, ...] = ()
    """Graph inputs that are sizes and that this node, its shape or its inputs' shapes depend on, ascending."""
    after: tuple[NodeId, ...] = ()
    """Nodes that must run earlier for another reason than data: random draws, mutation, side effects."""
    is_static: bool = False
    """A graph input that is the same tensor in every call, such as a parameter."""
    is_collective: bool = False
    """Communicates with other ranks; all ranks must do so in the same order."""
    is_alone: bool = False
    """Shares its segment only with nodes that are alone too."""
    keeps_order: bool = False
    """Draws random numbers or has a side effect; such nodes keep their order."""
    module: str = ""
    """FQN of the module the node came from; empty where the metadata did not survive."""
    is_backward: bool = False
    """Whether autograd made it, in a graph with both forward and backward."""
    num_bytes: int = 0
    """Size of the value."""
    work: Work = Work()
    signature: str = ""
    """Operator and constant arguments, with `%i` for `inputs[i]`."""
    value: str = ""
    """Shape, strides, dtype and device of the value; nodes with equal signature and inputs have equal values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """An FX graph after AOTAutograd, as plain data; `nodes` is in graph order and `nodes[i].id == i`."""

    name: str
    role: Role
    nodes: tuple[Node, ...]
    outputs: tuple[NodeId | None, ...]
    """Outputs of the graph, in order; None where it returns None."""
    without_formula: tuple[str, ...] = ()
    """Operators whose work is their bytes alone, sorted."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Values of the symbols in dynamic shapes, by name; bytes and work are for these sizes."""


# -------------------------------------------------------------------------------------------- stage 1: partition


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A tensor that crosses a segment boundary, or a graph input or output."""

    id: BufferId
    name: str
    producer: SegmentId | None
    """The segment that makes it; None for a graph input."""
    readers: tuple[SegmentId, ...]
    """Segments that read it, ascending."""
    num_bytes: int
    is_output: bool
    """Whether the graph returns it, so that it outlives the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of the FX graph that runs on one lane without interruption."""

    id: SegmentId
    name: str
    """Unique and readable, e.g. `vision_model.encoder.layers.0`, with the suffix `#2` for the second of a name."""
    module: str
    """FQN of the module that most of its work belongs to; empty where there is none."""
    body: BodyId
    inputs: tuple[BufferId, ...]
    """Buffers that it reads, in the order of the body's inputs."""
    outputs: tuple[BufferId, ...]
    """Buffers that it makes, in the order of the body's outputs."""
    after: tuple[SegmentId, ...]
    """Segments that must end earlier without a buffer between them."""
    work: Work
    workspace_bytes: int = 0
    """Bytes that it allocates while it runs, besides its outputs."""
    has_collective: bool = False
    """Communicates with other ranks; all ranks must do so in the same order."""
    phase: Phase | None = None
    """Its part of a training step, in the graph of a whole step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentGraph:
    """Segments in a topological order, and the buffers between them."""

    name: str
    role: Role
    segments: tuple[Segment, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[BufferId, ...]
    """Graph inputs, in the order of the call."""
    outputs: tuple[BufferId | None, ...]
    """Graph outputs, in the order of the return; None where the graph returns None."""

    def predecessors(self, segment: SegmentId) -> tuple[SegmentId, ...]:
        """Return the segments that `segment` depends on, by buffer or by order, ascending."""
        found = set(self.segments[segment].after)
        for buffer in self.segments[segment].inputs:
            producer = self.buffers[buffer].producer
            if producer is not None:
                found.add(producer)
        return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The code of one or more equal segments, before it is compiled."""

    id: BodyId
    name: str
    """Name of the first segment that has it."""
    nodes: tuple[NodeId, ...]
    """Nodes of that segment in graph order, clones of cheap nodes included."""
    inputs: tuple[NodeId, ...]
    """Values it takes, in order."""
    outputs: tuple[NodeId, ...]
    """Values it returns, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The segment graph and the bodies to compile for it."""

    graph: SegmentGraph
    bodies: tuple[Body, ...]
    nodes_by_segment: tuple[tuple[NodeId, ...], ...]
    """Nodes of every segment in graph order; cheap nodes may occur in several."""


# ------------------------------------------------------------------------------------------------- stage 2: cost


class CostSource(enum.StrEnum):
    """Source of a duration."""

    FORMULA = "formula"
    SCALED = "scaled"
    """The formula, corrected by the ratio of measurement to formula at the nearest measured number of units."""
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run a segment."""

    units: int
    duration_ns: int
    memory_bytes: int
    """Bytes it allocates: outputs and workspace."""
    source: CostSource = CostSource.FORMULA
    memory_share: float = 0.0
    """Share of the duration spent waiting for memory, 0 to 1."""
    launch_share: float = 0.0
    """Share of the duration spent launching the segment and its kernels, 0 to 1; the rest is arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Modes per segment, ascending in units, one per unit count of the lane catalogue."""

    modes: tuple[tuple[Mode, ...], ...]
    handover_ns: int
    """Time from the end of a segment to the start of its reader on another lane."""
    slowdown: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))
    """`slowdown[a][b]`: factor by which work of kind b on the rest of the device slows work of kind a, where kind 0 is
    arithmetic and kind 1 is memory traffic."""


# ------------------------------------------------------------------------------------------------- stage 3: plan


class Origin(enum.StrEnum):
    """Method that made a plan, and whether the plan is proven to be optimal."""

    OPTIMAL = "optimal"
    """Without interference, its makespan equals the bound. A solver's claim of optimality is not enough."""
    FEASIBLE = "feasible"
    """Found by the solver."""
    GREEDY = "greedy"
    """Found by a heuristic: list scheduling and local search."""
    SERIAL = "serial"
    """All segments on lane 0 in graph order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Units and bytes that one segment may hold while it runs."""

    units: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """An ordered executor with fixed units; two lanes conflict where they share a unit."""

    id: LaneId
    units: tuple[int, ...]
    """Indices of the device's units, ascending; none for a lane whose segments only wait for other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Lane, quota and time of one segment."""

    segment: SegmentId
    lane: LaneId
    quota: Quota
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        """When the segment is predicted to end."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSchedule:
    """A schedule that the planner considered."""

    name: str
    """Name of the method that made it."""
    undisturbed_ns: int
    """Makespan without interference between concurrent segments."""
    makespan_ns: int
    """Makespan with interference; candidates are ranked by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Per segment: lane, quota and start. `assignments[s].segment == s`."""

    origin: Origin
    lanes: tuple[Lane, ...]
    """The lane catalogue; lane 0 has every unit of the device."""
    assignments: tuple[Assignment, ...]
    """Durations include interference."""
    makespan_ns: int
    undisturbed_ns: int
    """Makespan without interference between concurrent segments; `lower_bound_ns` bounds it."""
    serial_ns: int
    """Predicted makespan of the serial plan."""
    lower_bound_ns: int
    candidates: tuple[RankedSchedule, ...] = ()
    """Candidates, in the order in which the planner considered them."""
    seed: int = 0
    solver: str | None = None
    """Name and version of the solver; None if only heuristics ran."""
    memory_quota: int | None = None
    """Bytes that buffers made by the graph may take at any instant; None is no limit. To keep it, a segment waits for
    all segments that end before its start in the plan, even if actual durations differ."""
    stopped_early: bool = False
    """Whether a time limit ended the search, so that a faster machine could find another plan."""
    pinned: bool = False
    """Whether lanes and order were read from a file instead of planned."""

    @property
    def gap(self) -> float:
        """Relative distance of the undisturbed makespan from the bound; 0.02 means at most 2 % above the optimum."""
        return self.undisturbed_ns / self.lower_bound_ns - 1 if self.lower_bound_ns else 0.0

    @property
    def uses_lanes(self) -> bool:
        """Whether a segment runs on another lane than lane 0, which has all units."""
        return any(assignment.lane != 0 for assignment in self.assignments)

    @property
    def num_lanes(self) -> int:
        """The number of lanes with segments."""
        return len({assignment.lane for assignment in self.assignments})

    def in_start_order(self) -> tuple[Assignment, ...]:
        """Return the assignments by start, ties by segment id: the one order that later stages use."""
        return tuple(sorted(self.assignments, key=lambda a: (a.start_ns, a.segment)))


# ------------------------------------------------------------------------------------------------- stage 4: sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency:
    """`consumer` starts after `producer` has ended."""

    producer: SegmentId
    consumer: SegmentId


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """Cross-lane dependencies that need a wait, and those that are implied by lane order and other waits."""

    waits: tuple[Dependency, ...]
    dropped: tuple[Dependency, ...]


# ----------------------------------------------------------------------------------------------- stage 5: memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """`buffer` stays alive until `segment` has ended; the lane of `segment` then releases it.

    If `segment` is itself a reader, its body takes the buffer over and may free it while it runs.
    """

    buffer: BufferId
    segment: SegmentId


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Release points of all buffers that are not graph outputs, and the planned peaks of bytes."""

    holds: tuple[Hold, ...]
    at_end: tuple[BufferId, ...]
    """Buffers that no segment may release: they are released at the end of the run."""
    peak_bytes_by_lane: tuple[int, ...]
    """Per lane of the plan, the peak of the bytes of buffers that were produced there and are still alive."""
    peak_bytes: int
    """Peak on the whole device, if segments run at their planned times."""


# ------------------------------------------------------------------------------------------------- stage 6: emit


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Run `body` for `segment`; the body takes over the inputs marked in `takes` and borrows the others."""

    segment: SegmentId
    body: BodyId
    inputs: tuple[BufferId, ...]
    takes: tuple[bool, ...]
    outputs: tuple[BufferId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Mark that everything before it on this lane has ended."""

    event: EventId


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Continue only after `event` was recorded in this run."""

    event: EventId


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Release the buffer."""

    buffer: BufferId


Instruction = Launch | Record | Wait | Release


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Input of the runtime: one list of instructions per lane of the plan."""

    name: str
    lanes: tuple[Lane, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    """Instructions of every lane, in order."""
    num_buffers: int
    num_events: int
    inputs: tuple[BufferId, ...]
    outputs: tuple[BufferId | None, ...]


# ------------------------------------------------------------------------------------------------ running and after


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Measured start and end of one segment, in nanoseconds since the run began."""

    segment: SegmentId
    lane: LaneId
    start_ns: int
    end_ns: int
    core: int
    """CPU core of the lane's thread when the segment ended; -1 where the device has no cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """All spans of one run, by start; empty if the graph has not run."""

    spans: tuple[Span, ...] = ()
    duration_ns: int = 0
    """Time from the call of the runtime to its return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Measured durations of one body on one number of units."""

    body: BodyId
    units: int
    count: int
    median_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """All measurements so far, by body and units, ascending."""

    entries: tuple[Observation, ...] = ()


# ---------------------------------------------------------------------------------------------------- graph breaks


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBreak:
    """A place where Dynamo had to end a graph, so that work before it cannot overlap with work after it."""

    graph: str
    """Name of the Dynamo graph that ends here."""
    problem: str
    explanation: str
    file: str
    line: int
    function: str
    code: str
    remedies: tuple[str, ...]
    """Changes that remove it, the most promising first."""
    callers: tuple[str, ...] = ()
    """`file:line` of every call that leads to it, the outermost first; the break itself is last."""
