"""Every lane captured alone, in a pool of memory that gives it no byte beyond its quota.

    capture_pieces(program, bodies, gpu, ...) -> PieceRecording

One CUDA graph over all lanes allocates for all of them in one pool, so a quota can only be looked at when the capture
has ended. Here the instructions of a lane are cut at its waits and records; every piece in between is a CUDA graph of
its own, captured on the lane's stream with the lane's pool. A replay launches the pieces on their lanes, with the waits
and records between them: more launches by the host, and in return a lane cannot take too much even for a moment.

Pieces of a lane share its pool and are always replayed in the order in which they were captured, so what one piece let
go another may use, as in one capture; see Note [who owns a buffer].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apollo_compile.device.gpu.gpu import Body, Gpu, LanePool, Recording, Stream
from apollo_compile.device.gpu.launch import Tuned, forked, launch_body
from apollo_compile.errors import MemoryQuotaError
from apollo_compile.ir import BufferId, Instruction, LaneId, Launch, Program, Record, Release, SegmentGraph, Wait
from apollo_compile.units import format_bytes

NO_QUOTA = 2**60
"""Bytes that no device has."""

Piece = tuple[LaneId, tuple[Instruction, ...]]
"""A lane's launches and releases, or one wait, or one record."""


def piece_order(program: Program) -> tuple[Piece, ...]:
    """Return an order in which one thread can launch pieces: every lane's own, with each record before its waits.

    Raises:
        ValueError: lanes wait for each other in a circle.
    """
    pieces = {lane.id: _cut(each) for lane, each in zip(program.lanes, program.instructions, strict=True)}
    order: list[Piece] = []
    recorded: set[int] = set()
    while any(pieces.values()):
        before = len(order)
        for lane, rest in pieces.items():
            while rest and not (isinstance(rest[0][0], Wait) and rest[0][0].event not in recorded):
                piece = rest.pop(0)
                if isinstance(piece[0], Record):
                    recorded.add(piece[0].event)
                order.append((lane, piece))
        if len(order) == before:
            raise ValueError(f"program {program.name} cannot be launched: its lanes wait for each other in a circle")
    return tuple(order)


def _cut(instructions: Sequence[Instruction]) -> list[tuple[Instruction, ...]]:
    pieces: list[tuple[Instruction, ...]] = []
    for instruction in instructions:
        is_more = isinstance(instruction, Launch | Release)
        if is_more and pieces and isinstance(pieces[-1][0], Launch | Release):
            pieces[-1] = (*pieces[-1], instruction)
        else:
            pieces.append((instruction,))
    return pieces


@dataclass(eq=False, slots=True)
class PieceRecording:
    """Pieces with what is between them."""

    gpu: Gpu
    steps: list[tuple[Stream | None, Recording | Record | Wait]]
    """With the stream of each; None is the caller's."""
    pools: dict[LaneId, LanePool]
    num_events: int

    def replay(self) -> None:
        """Launch all pieces; what follows on the caller's stream comes after them."""
        gpu, caller = self.gpu, self.gpu.caller_stream()
        lanes = list(dict.fromkeys(stream for stream, _ in self.steps if stream is not None))
        events = [gpu.new_event() for _ in range(self.num_events)]
        with forked(gpu, caller, lanes):
            for stream, step in self.steps:
                match step:
                    case Record(event=event):
                        gpu.record(events[event], stream or caller)
                    case Wait(event=event):
                        gpu.wait(events[event], stream or caller)
                    case _:
                        gpu.replay_on(step, stream or caller)

    def bytes_of(self, lane: LaneId, stream: Stream) -> int:
        """Return the bytes that the lane took, those of recordings with the same pools included."""
        return self.pools[lane].taken_bytes


def capture_pieces(
    program: Program,
    bodies: Sequence[Body],
    gpu: Gpu,
    inputs: Sequence[torch.Tensor],
    *,
    graph: SegmentGraph,
    quota: int,
    urgency: Mapping[LaneId, int],
    tuned: Tuned,
    shares: Recording | None,
) -> tuple[PieceRecording, list[torch.Tensor | None]]:
    """Capture every lane alone; return the recording, and the outputs at the addresses to which it writes them.

    Arguments:
        program: what to launch.
        bodies: by id.
        gpu: whose lanes it runs on.
        inputs: at the addresses that it reads.
        graph: the segments of the program, for the message.
        quota: bytes that one lane may take; the lane with every unit, which is the caller's stream, has none.
        urgency: which lanes go first where they share units.
        tuned: what lanes run instead of a body, by its id and their number of units.
        shares: an earlier recording, whose pools are used again.

    Raises:
        MemoryQuotaError: a lane asked for more than its quota; it got nothing, and nothing has run.
    """
    streams = {lane.id: gpu.lane_stream(lane, urgency.get(lane.id, 0)) for lane in program.lanes}
    units = {lane.id: len(lane.units) for lane in program.lanes}
    pools = dict(shares.pools) if isinstance(shares, PieceRecording) else {}
    values: dict[BufferId, torch.Tensor] = dict(zip(program.inputs, inputs, strict=True))
    steps: list[tuple[Stream | None, Recording | Record | Wait]] = []
    for lane, piece in piece_order(program):
        if isinstance(piece[0], Record | Wait):
            steps.append((streams[lane], piece[0]))
            continue
        if lane not in pools:
            pools[lane] = gpu.lane_pool(streams[lane], NO_QUOTA if streams[lane] is None else quota)
        capture = _PieceCapture(piece, bodies, gpu, values, graph, lane, pools[lane], quota, units[lane], tuned)
        if any(isinstance(instruction, Launch) for instruction in piece):
            steps.append((streams[lane], gpu.capture_alone(capture.work, streams[lane], pools[lane])))
        else:
            capture.work(None)
    recording = PieceRecording(gpu=gpu, steps=steps, pools=pools, num_events=program.num_events)
    return recording, [None if buffer is None else values[buffer] for buffer in program.outputs]


@dataclass(eq=False, slots=True)
class _PieceCapture:
    """Launches one piece."""

    piece: tuple[Instruction, ...]
    bodies: Sequence[Body]
    gpu: Gpu
    values: dict[BufferId, torch.Tensor]
    graph: SegmentGraph
    lane: LaneId
    pool: LanePool
    quota: int
    units: int
    tuned: Tuned

    def work(self, stream: Stream) -> None:
        """Launch on `stream`; a piece that only releases needs none."""
        for instruction in self.piece:
            if isinstance(instruction, Release):
                del self.values[instruction.buffer]
            elif isinstance(instruction, Launch):
                self._launch(instruction, stream)

    def _launch(self, launch: Launch, stream: Stream) -> None:
        body = self.tuned.get((launch.body, self.units), self.bodies[launch.body])
        try:
            launch_body(launch, body, self.values, self.gpu, stream)
        except torch.OutOfMemoryError as error:
            asked = self.pool.refused_bytes
            if not asked:  # the device itself has no more
                raise
            name, has = self.graph.segments[launch.segment].name, format_bytes(self.pool.taken_bytes)
            raise MemoryQuotaError(
                f"lane {self.lane} of {self.graph.name} asked for {format_bytes(asked)} more for {name} and got "
                f"nothing: it has {has} of {format_bytes(self.quota)}; raise 'device.lane_memory_quota', or cut the "
                "graph with 'partition.max_segment_share'"
            ) from error
