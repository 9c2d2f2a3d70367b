"""Stage 6: emit the instructions of every lane.

    (SegmentGraph, Plan, SyncPlan, MemoryPlan) -> Program

Lane order is start order. A segment becomes its waits, its launch, one record if another lane waits for it, and its
releases, in this order. One event serves all waits for its segment. A wait names a segment that is launched, and
recorded, earlier in start order, so no cycle of waits can arise. The record comes before the releases, because a lane
that waits does not depend on them; only the last segment of a lane releases first, so that waiting for it is waiting
for the whole lane.

Guarantees: each segment is launched once; each wait has exactly one record; the happens-before relation is exactly that
of the sync plan. A launch takes over the inputs whose hold ends with it; every other hold becomes a release.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from apollo_compile.ir import (
    BufferId,
    EventId,
    Instruction,
    Launch,
    MemoryPlan,
    Plan,
    Program,
    Record,
    Release,
    SegmentGraph,
    SegmentId,
    SyncPlan,
    Wait,
)


def emit_program(graph: SegmentGraph, plan: Plan, syncs: SyncPlan, memory: MemoryPlan) -> Program:
    """Return the program that runs the plan."""
    order = plan.in_start_order()
    waited_for = {wait.producer for wait in syncs.waits}
    events: dict[SegmentId, EventId] = {}
    for assignment in order:
        if assignment.segment in waited_for:
            events[assignment.segment] = EventId(len(events))
    producers: dict[SegmentId, list[SegmentId]] = {}
    for wait in syncs.waits:
        producers.setdefault(wait.consumer, []).append(wait.producer)
    held: dict[SegmentId, list[BufferId]] = {}
    for hold in memory.holds:
        held.setdefault(hold.segment, []).append(hold.buffer)

    last = {assignment.lane: assignment.segment for assignment in order}
    instructions: list[list[Instruction]] = [[] for _ in plan.lanes]
    for assignment in order:
        segment, block = graph.segments[assignment.segment], instructions[assignment.lane]
        released = held.get(segment.id, [])
        block += [Wait(event=event) for event in sorted(events[producer] for producer in producers.get(segment.id, []))]
        block.append(
            Launch(
                segment=segment.id,
                body=segment.body,
                inputs=segment.inputs,
                takes=_takes(segment.inputs, released),
                outputs=segment.outputs,
            )
        )
        records = [Record(event=events[segment.id])] if segment.id in events else []
        releases = [Release(buffer=buffer) for buffer in released if buffer not in segment.inputs]
        block += [*releases, *records] if segment.id == last[assignment.lane] else [*records, *releases]
    return Program(
        name=graph.name,
        lanes=plan.lanes,
        instructions=tuple(tuple(block) for block in instructions),
        num_buffers=len(graph.buffers),
        num_events=len(events),
        inputs=graph.inputs,
        outputs=graph.outputs,
    )


def _takes(inputs: Sequence[BufferId], released: Collection[BufferId]) -> tuple[bool, ...]:
    """Return which inputs a launch takes over; of a repeated input, the last occurrence is taken over."""
    return tuple(buffer in released and buffer not in inputs[place + 1 :] for place, buffer in enumerate(inputs))
