"""The race oracle: runs a program in a random legal interleaving and reports what could go wrong in any.

    find_races(program, graph, rng) -> one line per defect, nothing for a sound program

Every lane is a thread with a vector clock; a record saves its clock, a wait takes it over. Which lane moves next is
random. Two actions that no clock orders could happen at the same time, whether or not they did in this interleaving.
It knows nothing of plans and waits that were meant: what must be ordered comes from the graph and the units alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from apollo_compile.ir import BufferId, Launch, Program, Record, Release, SegmentGraph, SegmentId, Wait


@dataclass(frozen=True, slots=True)
class _Action:
    """Something that a lane did: its own time on that lane, and what it knows of all lanes."""

    lane: int
    time: int
    clock: tuple[int, ...]
    what: str

    def is_before(self, other: _Action) -> bool:
        """Return whether this ended before the other began, in every interleaving."""
        return self is not other and other.clock[self.lane] >= self.time


def without_each_wait(program: Program) -> Iterator[Program]:
    """Yield the program without one of its waits, for each of them."""
    for lane, instructions in enumerate(program.instructions):
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Wait):
                yield without(program, lane, index)


def without(program: Program, lane: int, index: int) -> Program:
    """Return the program without one instruction."""
    blocks = list(program.instructions)
    blocks[lane] = blocks[lane][:index] + blocks[lane][index + 1 :]
    return replace(program, instructions=tuple(blocks))


def find_races(program: Program, graph: SegmentGraph, rng: random.Random) -> list[str]:
    """Return the defects of a program: races, missing or repeated actions, deadlock."""
    launches: dict[SegmentId, _Action] = {}
    gone: dict[BufferId, list[_Action]] = {}
    defects = _run(program, graph, rng, launches, gone)
    for segment in graph.segments:
        if segment.id not in launches:
            defects.append(f"segment {segment.id} never runs")

    for segment in graph.segments:
        for earlier in segment.after:
            _expect_order(launches.get(earlier), launches.get(segment.id), "effects", defects)
    for buffer in graph.buffers:
        made = None if buffer.producer is None else launches.get(buffer.producer)
        reads = [launches[reader] for reader in buffer.readers if reader in launches]
        for read in reads:
            if buffer.producer is not None:
                _expect_order(made, read, f"buffer {buffer.id}", defects)
        ends = gone.get(buffer.id, [])
        if len(ends) > 1 or (ends and buffer.is_output):
            defects.append(
                f"buffer {buffer.id} is released by {[end.what for end in ends]}, returned: {buffer.is_output}"
            )
        for end in ends:
            for use in [*reads, *([made] if made else [])]:
                if use.what != end.what:
                    _expect_order(use, end, f"end of buffer {buffer.id}", defects)
    actions = list(launches.values())
    for index, one in enumerate(actions):
        for other in actions[:index]:
            shared = set(program.lanes[one.lane].units) & set(program.lanes[other.lane].units)
            if shared and not one.is_before(other) and not other.is_before(one):
                defects.append(f"{one.what} and {other.what} run at once on units {sorted(shared)}")
    return defects


def _run(
    program: Program,
    graph: SegmentGraph,
    rng: random.Random,
    launches: dict[SegmentId, _Action],
    gone: dict[BufferId, list[_Action]],
) -> list[str]:
    """Run all lanes to their end; fill in what ran and which buffers went."""
    defects: list[str] = []
    num_lanes = len(program.lanes)
    clocks = [[0] * num_lanes for _ in range(num_lanes)]
    position = [0] * num_lanes
    saved: dict[int, tuple[int, ...]] = {}

    def act(lane: int, what: str) -> _Action:
        known = tuple(clocks[lane])
        clocks[lane][lane] += 1
        return _Action(lane, clocks[lane][lane], known, what)

    def can_move(lane: int) -> bool:
        if position[lane] >= len(program.instructions[lane]):
            return False
        instruction = program.instructions[lane][position[lane]]
        return not isinstance(instruction, Wait) or instruction.event in saved

    while movable := [lane for lane in range(num_lanes) if can_move(lane)]:
        lane = rng.choice(movable)
        instruction = program.instructions[lane][position[lane]]
        position[lane] += 1
        match instruction:
            case Launch():
                if instruction.segment in launches:
                    defects.append(f"segment {instruction.segment} runs twice")
                action = act(lane, f"segment {instruction.segment}")
                launches[instruction.segment] = action
                for buffer in instruction.inputs:
                    if buffer in gone and gone[buffer][0].is_before(action):
                        defects.append(f"segment {instruction.segment} reads buffer {buffer} after it went")
                for buffer, takes in zip(instruction.inputs, instruction.takes, strict=True):
                    if takes:
                        gone.setdefault(buffer, []).append(action)
            case Release():
                gone.setdefault(instruction.buffer, []).append(act(lane, f"release of buffer {instruction.buffer}"))
            case Record():
                if instruction.event in saved:
                    defects.append(f"event {instruction.event} is recorded twice")
                saved[instruction.event] = tuple(clocks[lane])
            case Wait():
                clocks[lane][:] = map(max, clocks[lane], saved[instruction.event])
    for lane in range(num_lanes):
        if position[lane] < len(program.instructions[lane]):
            defects.append(f"deadlock: lane {lane} stops at {program.instructions[lane][position[lane]]}")
    return defects


def _expect_order(earlier: _Action | None, later: _Action | None, why: str, defects: list[str]) -> None:
    if earlier is not None and later is not None and not earlier.is_before(later):
        defects.append(f"{later.what} is not ordered after {earlier.what}: {why}")
