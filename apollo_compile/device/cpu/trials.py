"""Programs of test bodies on lanes, for calibration.

    TrialProgram(bodies, steps, lanes).run();  .runs -> the spans of every run

A step is a body on a lane. Steps of one lane run in order; `Waits` adds waits for steps of other lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from apollo_compile.device.cpu.execute import Executable
from apollo_compile.ir import (
    BodyId,
    Buffer,
    BufferId,
    Lane,
    LaneId,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Span,
    Work,
)
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.plan import plan_in_order
from apollo_compile.passes.sync import eliminate_syncs
from apollo_compile.target.target import CompiledBody


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialBody:
    """A compiled body with its inputs."""

    body: CompiledBody
    inputs: tuple[torch.Tensor, ...]
    num_outputs: int


def lanes_of(units: int, first: int) -> tuple[Lane, ...]:
    """Return a lane of all units, a lane of the first `first` units, and a lane of the rest; only lane 0 if no rest."""
    ranges = [range(units), range(first), range(first, units)]
    chosen = [tuple(units) for units in ranges[: 1 if first == units else 3]]
    return tuple(Lane(id=LaneId(index), units=units) for index, units in enumerate(chosen))


class Waits(Enum):
    """Steps that a step waits for, besides the previous step on its lane."""

    FOR_NOTHING = auto()
    FOR_FIRST = auto()
    """The first step of the program, so that all lanes begin together."""
    FOR_PREVIOUS = auto()
    """The previous step, on any lane."""

    def before(self, step: int) -> tuple[SegmentId, ...]:
        """Return the step that `step` waits for, if any."""
        if self is Waits.FOR_NOTHING or step == 0:
            return ()
        return (SegmentId(0 if self is Waits.FOR_FIRST else step - 1),)


class TrialProgram:
    """A program of bodies on lanes. Steps on one lane run in order; if there is only one lane, it runs all steps."""

    def __init__(
        self,
        bodies: dict[str, TrialBody],
        steps: Sequence[tuple[str, int]],
        lanes: tuple[Lane, ...],
        *,
        waits: Waits = Waits.FOR_NOTHING,
    ) -> None:
        used = {name: bodies[name] for name, _ in steps}
        chosen = [(name, min(lane, len(lanes) - 1)) for name, lane in steps]
        graph = _make_graph(used, [name for name, _ in chosen], waits=waits)
        plan = plan_in_order([LaneId(lane) for _, lane in chosen], lanes)
        syncs = eliminate_syncs(graph, plan)
        program = emit_program(graph, plan, syncs, plan_memory(graph, plan, syncs))
        compiled = [body.body for body in used.values()]
        self._executable = Executable(program, graph, compiled, mutates=False, park_team=True)
        self._inputs = [tensor for body in used.values() for tensor in body.inputs]
        self.runs: list[list[Span]] = []
        """Spans of every run, by step."""

    def run(self) -> None:
        """Run twice, since the first run warms the caches; keep the spans of the second."""
        for _ in range(2):
            self._executable.run(list(self._inputs))
        self.runs.append(sorted(self._executable.trace().spans, key=lambda span: span.segment))


def _make_graph(bodies: dict[str, TrialBody], steps: Sequence[str], *, waits: Waits) -> SegmentGraph:
    """Return one segment per step; all steps of a body read the same inputs."""
    names = list(bodies)
    buffers: list[Buffer] = []
    inputs: dict[str, tuple[BufferId, ...]] = {}
    for name in names:
        readers = tuple(SegmentId(step) for step, other in enumerate(steps) if other == name)
        first = len(buffers)
        buffers += [_buffer(first + place, None, readers) for place in range(len(bodies[name].inputs))]
        inputs[name] = tuple(buffer.id for buffer in buffers[first:])
    segments = []
    for step, name in enumerate(steps):
        first = len(buffers)
        buffers += [_buffer(first + place, SegmentId(step), ()) for place in range(bodies[name].num_outputs)]
        segments.append(
            Segment(
                id=SegmentId(step),
                name=f"{name}#{step}",
                module="",
                body=BodyId(names.index(name)),
                inputs=inputs[name],
                outputs=tuple(buffer.id for buffer in buffers[first:]),
                after=waits.before(step),
                work=Work(),
            )
        )
    return SegmentGraph(
        name="calibration",
        role=Role.INFERENCE,
        segments=tuple(segments),
        buffers=tuple(buffers),
        inputs=tuple(buffer for name in names for buffer in inputs[name]),
        outputs=(),
    )


def _buffer(place: int, producer: SegmentId | None, readers: tuple[SegmentId, ...]) -> Buffer:
    return Buffer(
        id=BufferId(place), name=f"b{place}", producer=producer, readers=readers, num_bytes=0, is_output=False
    )
