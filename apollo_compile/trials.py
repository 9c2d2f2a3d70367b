"""Programs whose lanes and order are given, made by the passes that make a model's.

write_program(name, steps, lanes, ...) -> graph and program of a few steps, by which a device is tried out
program_in_order(graph, lanes, chosen) -> program of a graph
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apollo_compile.ir import (
    BodyId,
    Buffer,
    BufferId,
    Lane,
    LaneId,
    Program,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Work,
)
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.plan import plan_in_order
from apollo_compile.passes.sync import eliminate_syncs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStep:
    """One segment: a body, the buffers that it reads, how many it makes, and its lane."""

    body: int
    reads: tuple[int, ...]
    lane: int
    makes: int = 1
    after: tuple[int, ...] = ()
    """Earlier steps that it waits for, besides those whose buffers it reads."""


def write_program(
    name: str,
    steps: Sequence[TrialStep],
    lanes: tuple[Lane, ...],
    *,
    num_inputs: int,
    outputs: Sequence[int] = (),
    role: Role = Role.INFERENCE,
    owners_release: bool = True,
) -> tuple[SegmentGraph, Program]:
    """Return the graph and the program of these steps; those of one lane run in order.

    Arguments:
        name: name of the graph.
        steps: its segments.
        lanes: by id; the first has every unit.
        num_inputs: number of inputs, which are the first buffers; the outputs of each step follow in order.
        outputs: buffers that the program returns.
        role: role of the graph.
        owners_release: see `plan_memory`.
    """
    producers: list[SegmentId | None] = [None] * num_inputs
    segments = []
    for index, step in enumerate(steps):
        made = range(len(producers), len(producers) + step.makes)
        producers += [SegmentId(index)] * step.makes
        segments.append(
            Segment(
                id=SegmentId(index),
                name=f"step {index}",
                module="",
                body=BodyId(step.body),
                inputs=tuple(map(BufferId, step.reads)),
                outputs=tuple(map(BufferId, made)),
                after=tuple(map(SegmentId, step.after)),
                work=Work(),
            )
        )
    buffers = tuple(
        Buffer(
            id=BufferId(index),
            name=f"buffer {index}",
            producer=producer,
            readers=tuple(SegmentId(reader) for reader, step in enumerate(steps) if index in step.reads),
            num_bytes=1,
            is_output=index in outputs,
        )
        for index, producer in enumerate(producers)
    )
    graph = SegmentGraph(
        name=name,
        role=role,
        segments=tuple(segments),
        buffers=buffers,
        inputs=tuple(map(BufferId, range(num_inputs))),
        outputs=tuple(map(BufferId, outputs)),
    )
    chosen = [LaneId(step.lane) for step in steps]
    return graph, program_in_order(graph, lanes, chosen, owners_release=owners_release)


def program_in_order(
    graph: SegmentGraph, lanes: tuple[Lane, ...], chosen: Sequence[LaneId], *, owners_release: bool
) -> Program:
    """Return the program that runs segment n as the n-th, on lane `chosen[n]`."""
    plan = plan_in_order(chosen, lanes)
    syncs = eliminate_syncs(graph, plan)
    return emit_program(graph, plan, syncs, plan_memory(graph, plan, syncs, owners_release=owners_release))
