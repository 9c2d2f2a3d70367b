"""Checks of sync plans, memory plans and programs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from apollo_compile.ir import (
    BufferId,
    Dependency,
    EventId,
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
from apollo_compile.ir.check.failure import at_segment, fail, repeated
from apollo_compile.ir.check.order import closure, direct_order, needed_order, users_of


def check_syncs(syncs: SyncPlan, graph: SegmentGraph, plan: Plan) -> None:
    """Check that lane order and waits enforce every dependency, and that no wait can be removed."""
    lane_of = [assignment.lane for assignment in plan.assignments]
    direct = direct_order(plan, syncs)
    before = closure(direct, [assignment.segment for assignment in plan.in_start_order()])
    needed = needed_order(graph, plan)
    for producer, consumer in needed:
        if not before[consumer] >> producer & 1:
            fail("sync plan", f"nothing orders it after segment {producer}", at_segment(graph, consumer))
    for wait in syncs.waits:
        at = at_segment(graph, wait.consumer)
        if lane_of[wait.producer] == lane_of[wait.consumer]:
            fail("sync plan", f"waits for segment {wait.producer} of its own lane {lane_of[wait.consumer]}", at)
        others = [other for other in direct[wait.consumer] if other != wait.producer]
        implied = any(other == wait.producer or before[other] >> wait.producer & 1 for other in others)
        if implied or direct[wait.consumer].count(wait.producer) > 1:
            fail("sync plan", f"the wait for segment {wait.producer} is implied by lane order and other waits", at)
    across = {Dependency(producer=p, consumer=c) for p, c in needed if lane_of[p] != lane_of[c]}
    listed = [*syncs.waits, *syncs.dropped]
    if len(set(listed)) != len(listed) or set(listed) != across:
        wrong = sorted((d.producer, d.consumer) for d in set(listed) ^ across)
        found = f"waits and dropped must be the {len(across)} cross-lane dependencies, each once; got {len(listed)}"
        fail("sync plan", f"{found}, different or repeated: {wrong or 'repeated'}", f"graph {graph.name}")


def check_memory(
    memory: MemoryPlan, graph: SegmentGraph, plan: Plan, syncs: SyncPlan, *, owners_release: bool = False
) -> None:
    """Check that every buffer that is not a graph output is released once, by a segment ordered after all its users.

    With `owners_release`, that segment is on the lane of the buffer's producer, and no segment releases a graph input.
    """
    before = closure(direct_order(plan, syncs), [assignment.segment for assignment in plan.in_start_order()])
    released = [*(hold.buffer for hold in memory.holds), *memory.at_end]
    expected = [buffer.id for buffer in graph.buffers if not buffer.is_output]
    if sorted(released) != expected:
        wrong = sorted(set(released) ^ set(expected)) or repeated(released)
        found = f"each of the {len(expected)} buffers that are not returned is released once; wrong: {wrong}"
        fail("memory plan", found, f"graph {graph.name}")
    for hold in memory.holds:
        buffer = graph.buffers[hold.buffer]
        owner = None if buffer.producer is None else plan.assignments[buffer.producer].lane
        if owners_release and plan.assignments[hold.segment].lane != owner:
            found = f"releases buffer {buffer.id} ({buffer.name}) on another lane than its owner's, {owner}"
            fail("memory plan", found, at_segment(graph, hold.segment))
        for user in users_of(graph, buffer.id):
            if user != hold.segment and not before[hold.segment] >> user & 1:
                found = (
                    f"releases buffer {buffer.id} ({buffer.name}) without being ordered after its user, segment {user}"
                )
                fail("memory plan", found, at_segment(graph, hold.segment))
    peaks = memory.peak_bytes_by_lane
    if len(peaks) != len(plan.lanes) or not max(peaks, default=0) <= memory.peak_bytes <= sum(peaks):
        found = (
            f"expected a peak per lane, the largest <= the device's <= their sum; got {peaks} and {memory.peak_bytes}"
        )
        fail("memory plan", found, f"graph {graph.name}")


def check_program(program: Program, graph: SegmentGraph, plan: Plan, syncs: SyncPlan, memory: MemoryPlan) -> None:
    """Check launches, events and buffers by symbolic execution; the happens-before relation is the sync plan's."""
    where = f"program {program.name}"
    if (program.lanes, program.num_buffers) != (plan.lanes, len(graph.buffers)):
        fail("program", "lanes and buffers must be those of the plan and the graph", where)
    if (program.inputs, program.outputs) != (graph.inputs, graph.outputs):
        fail("program", "inputs and outputs must be those of the graph", where)
    _check_launches(program, graph, plan)
    before = _execute(program, graph)
    expected = closure(direct_order(plan, syncs), [assignment.segment for assignment in plan.in_start_order()])
    for segment in graph.segments:
        if before[segment.id] != expected[segment.id]:
            bad = [other.id for other in graph.segments if (before[segment.id] ^ expected[segment.id]) >> other.id & 1]
            fail(
                "program",
                f"its order against segments {bad} is not that of the sync plan",
                at_segment(graph, segment.id),
            )
    communicating = [segment.id for segment in graph.segments if segment.has_collective]
    for first, second in itertools.pairwise(communicating):
        if not before[second] >> first & 1:
            found = f"may issue its collectives before those of segment {first}, which come first in the graph"
            fail("program", found, at_segment(graph, second))
    _check_buffers(program, graph, before, memory)


def _check_launches(program: Program, graph: SegmentGraph, plan: Plan) -> None:
    launched: dict[SegmentId, int] = {}
    recorded: list[EventId] = []
    for lane, instructions in enumerate(program.instructions):
        for instruction in instructions:
            if isinstance(instruction, Launch):
                at = at_segment(graph, instruction.segment)
                segment = graph.segments[instruction.segment]
                if segment.id in launched:
                    fail("program", f"launched on lanes {launched[segment.id]} and {lane}", at)
                if lane != plan.assignments[segment.id].lane:
                    fail("program", f"planned on lane {plan.assignments[segment.id].lane}, launched on lane {lane}", at)
                body = (instruction.body, instruction.inputs, instruction.outputs)
                if body != (segment.body, segment.inputs, segment.outputs):
                    fail("program", f"expected its body, inputs and outputs, got {body}", at)
                if len(instruction.takes) != len(instruction.inputs):
                    fail("program", f"{len(instruction.inputs)} inputs, {len(instruction.takes)} takes", at)
                launched[segment.id] = lane
            elif isinstance(instruction, Record):
                recorded.append(instruction.event)
    if missing := [segment.id for segment in graph.segments if segment.id not in launched]:
        fail("program", f"segments {missing} are not launched", f"program {program.name}")
    if sorted(recorded) != list(range(program.num_events)):
        found = f"expected events 0 to {program.num_events - 1} recorded once each, got {sorted(recorded)}"
        fail("program", found, f"program {program.name}")


def _execute(program: Program, graph: SegmentGraph) -> list[int]:
    """Run all lanes as far as waits allow; return, per segment, the segments known to have ended when it starts."""
    position = [0] * len(program.instructions)
    known = [0] * len(program.instructions)
    at_event: dict[EventId, int] = {}
    before = [0] * len(graph.segments)
    moved = True
    while moved:
        moved = False
        for lane, instructions in enumerate(program.instructions):
            while position[lane] < len(instructions):
                instruction = instructions[position[lane]]
                if isinstance(instruction, Wait):
                    if instruction.event not in at_event:
                        break
                    known[lane] |= at_event[instruction.event]
                elif isinstance(instruction, Record):
                    at_event[instruction.event] = known[lane]
                elif isinstance(instruction, Launch):
                    before[instruction.segment] = known[lane]
                    known[lane] |= 1 << instruction.segment
                position[lane] += 1
                moved = True
    for lane, instructions in enumerate(program.instructions):
        if position[lane] < len(instructions):
            found = f"lane {lane} waits forever at instruction {position[lane]}, {instructions[position[lane]]}"
            fail("program", found, f"program {program.name}")
    return before


def _check_buffers(program: Program, graph: SegmentGraph, before: Sequence[int], memory: MemoryPlan) -> None:
    """Check that inputs exist when a segment starts, and that buffers are released as the memory plan says."""
    holds = {hold.buffer: hold.segment for hold in memory.holds}
    gone: dict[BufferId, SegmentId] = {}
    for lane, instructions in enumerate(program.instructions):
        latest: SegmentId | None = None
        for instruction in instructions:
            released: list[BufferId] = []
            if isinstance(instruction, Launch):
                latest = instruction.segment
                for buffer in instruction.inputs:
                    producer = graph.buffers[buffer].producer
                    if producer is not None and not before[latest] >> producer & 1:
                        fail(
                            "program",
                            f"reads buffer {buffer} before segment {producer} has made it",
                            at_segment(graph, latest),
                        )
                released = [
                    buffer for buffer, takes in zip(instruction.inputs, instruction.takes, strict=True) if takes
                ]
            elif isinstance(instruction, Release):
                released = [instruction.buffer]
            for buffer in released:
                if latest is None:
                    fail("program", f"buffer {buffer} is released before anything ran", f"lane {lane}")
                at = at_segment(graph, latest)
                if buffer in gone or graph.buffers[buffer].is_output:
                    fail(
                        "program",
                        f"buffer {buffer} is returned, or was released by segment {gone.get(buffer)} before",
                        at,
                    )
                if holds.get(buffer) != latest:
                    fail("program", f"releases buffer {buffer}, which segment {holds.get(buffer)} holds", at)
                for user in users_of(graph, buffer):
                    if user != latest and not before[latest] >> user & 1:
                        fail("program", f"releases buffer {buffer} while segment {user} may use it", at)
                gone[buffer] = latest
    if missing := sorted(set(holds) - set(gone)):
        fail("program", f"buffers {missing} are held and never released", f"program {program.name}")
