"""Launch a program from the host.

    host_order(program)  -> one order of all instructions that keeps each lane's order, with records before their waits
    find_releases(program, owners)  -> where inputs of the graph may be released
    Launcher(...).launch(inputs, stream)  -> the outputs, once everything is launched
    launch_with_room(launcher, inputs)  -> the same, in memory of CUDA graphs if there is no other

The host launches all lanes from one thread; the device runs them in parallel. A wait for an event that is not recorded
yet would have no effect, so records come before their waits; otherwise lanes take turns, one launch each, so that no
lane starts late because the host is busy with another.

    fork    every lane that the program uses waits for the caller's stream
    ...     launches, and the records and waits of the sync plan
    join    the caller's stream waits for every lane

Buffers are held until the join unless the memory plan releases them earlier; see Note [who owns a buffer].
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from apollo_compile.device.gpu.run.gpu import BodyFunction, Event, Gpu, Stream
from apollo_compile.ir import BufferId, Instruction, LaneId, Launch, Program, Record, Release, Wait
from apollo_compile.torch_bridge.profiler import is_profiling, named

_logger = logging.getLogger(__name__)

HostOrder = tuple[tuple[LaneId, Instruction], ...]

Before = Callable[[Launch, Sequence[torch.Tensor], Stream], None]
"""Called before the launch of every body, with its instruction, its inputs and its stream."""

Made = Callable[[Stream, Sequence[torch.Tensor]], None]
"""Called after the launch of every body, with its stream and its outputs."""

Releases = Mapping[int, Sequence[BufferId]]
"""Inputs of the graph that are released behind an instruction, by its place in the order of the host."""


def host_order(program: Program) -> HostOrder:
    """Return the order in which one thread can launch the program.

    Raises:
        ValueError: lanes wait for each other in a circle.
    """
    order: list[tuple[LaneId, Instruction]] = []
    position = {lane.id: 0 for lane in program.lanes}
    recorded: set[int] = set()
    total = sum(map(len, program.instructions))
    while len(order) < total:
        before = len(order)
        for lane, instructions in zip(program.lanes, program.instructions, strict=True):
            has_launched = False
            while position[lane.id] < len(instructions):
                instruction = instructions[position[lane.id]]
                is_early = isinstance(instruction, Wait) and instruction.event not in recorded
                if is_early or (has_launched and isinstance(instruction, Launch | Wait)):
                    break
                if isinstance(instruction, Record):
                    recorded.add(instruction.event)
                has_launched = has_launched or isinstance(instruction, Launch)
                order.append((lane.id, instruction))
                position[lane.id] += 1
        if len(order) == before:
            raise ValueError(f"program {program.name} cannot be launched: its lanes wait for each other in a circle")
    return tuple(order)


def find_releases(program: Program, owners: Mapping[BufferId, LaneId]) -> Releases:
    """Return the earliest instruction behind which each of these inputs may be released.

    Released memory goes back to the stream that allocated it, and the next body there may overwrite it. So an input is
    released behind an instruction on its owner's lane, once that lane is ordered after all readers. Inputs that are
    outputs, too, and those whose readers no later instruction of the owner is ordered after, are not released.

    Arguments:
        program: the program that reads the inputs.
        owners: the lane on whose stream an input was allocated.
    """
    left = {
        buffer: sum(
            buffer in instruction.inputs
            for instructions in program.instructions
            for instruction in instructions
            if isinstance(instruction, Launch)
        )
        for buffer in owners
        if buffer in program.inputs and buffer not in program.outputs
    }
    clocks: dict[LaneId, Counter[LaneId]] = {lane.id: Counter() for lane in program.lanes}
    recorded: dict[int, Counter[LaneId]] = {}
    readers: dict[BufferId, Counter[LaneId]] = {buffer: Counter() for buffer in left}
    releases: dict[int, list[BufferId]] = {}
    for place, (lane, instruction) in enumerate(host_order(program)):
        clock = clocks[lane]
        match instruction:
            case Launch(inputs=inputs):
                clock[lane] += 1
                for buffer in left.keys() & set(inputs):
                    readers[buffer][lane] = clock[lane]
                    left[buffer] -= 1
            case Record(event=event):
                recorded[event] = clock.copy()
            case Wait(event=event):
                clock |= recorded[event]
        for buffer in sorted(left):
            if owners[buffer] == lane and not left[buffer] and readers[buffer] <= clock:
                releases.setdefault(place, []).append(buffer)
                del left[buffer]
    return releases


def order_after(gpu: Gpu, earlier: Sequence[Stream], later: Sequence[Stream]) -> None:
    """Make later launches on the `later` streams wait for everything launched on the `earlier` streams."""
    for source in earlier if later else ():
        event: Event = gpu.new_event()
        gpu.record(event, source)
        for target in later:
            gpu.wait(event, target)


@contextlib.contextmanager
def forked(gpu: Gpu, origin: Stream, lanes: Sequence[Stream]) -> Iterator[None]:
    """Fork the lanes from `origin`, and join them at the end of the `with`.

    They are joined after an exception, too: ending a capture with an unjoined lane is another error, which would hide
    the first one.
    """
    order_after(gpu, [origin], lanes)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the exception may have ended the capture
            order_after(gpu, lanes, [origin])
        raise
    order_after(gpu, lanes, [origin])


class Launcher:
    """Launches one program, on lanes or inside a capture."""

    def __init__(self, program: Program, bodies: Sequence[BodyFunction], gpu: Gpu, names: Sequence[str] = ()) -> None:
        """Create the streams of the lanes that the program uses; `names` of the segments are for profilers."""
        self.program = program
        self._bodies = tuple(bodies)
        self.gpu = gpu
        self._order = host_order(program)
        self._names = names
        self._streams: dict[LaneId, Stream] = {}
        for lane, instructions in zip(program.lanes, program.instructions, strict=True):
            stream = gpu.lane_stream(lane) if instructions else None
            if stream is not None:
                self._streams[lane.id] = stream

    @property
    def streams(self) -> dict[LaneId, Stream]:
        """Streams by lane, without lanes on the caller's stream."""
        return self._streams

    def launch(
        self,
        inputs: list[torch.Tensor],
        origin: Stream,
        before: Before = lambda launch, arguments, stream: None,
        made: Made = lambda stream, outputs: None,
        releases: Releases = MappingProxyType({}),
    ) -> list[torch.Tensor | None]:
        """Launch everything from the stream `origin` and return the outputs; `inputs` is emptied.

        It uses new events, since a capture and a run outside of it must not share events.
        """
        gpu, lanes = self.gpu, list(self._streams.values())
        values: dict[BufferId, torch.Tensor] = dict(zip(self.program.inputs, inputs, strict=True))
        inputs.clear()
        events = [gpu.new_event() for _ in range(self.program.num_events)]
        names = self._names if is_profiling() else ()
        with forked(gpu, origin, lanes):
            for place, (lane, instruction) in enumerate(self._order):
                stream = self._streams.get(lane, origin)
                match instruction:
                    case Launch():
                        body = self._bodies[instruction.body]
                        with named(names[instruction.segment] if names else None):
                            made(stream, _launch_body(instruction, body, values, self.gpu, stream, before))
                    case Record(event=event):
                        gpu.record(events[event], stream)
                    case Wait(event=event):
                        gpu.wait(events[event], stream)
                    case Release(buffer=buffer):
                        del values[buffer]
                for buffer in releases.get(place, ()):
                    values.pop(buffer, None)  # its reader may have taken it
        return [None if buffer is None else values[buffer] for buffer in self.program.outputs]


def launch_with_room(
    launcher: Launcher, inputs: list[torch.Tensor], *, num_bytes: int, may_repeat: bool
) -> list[torch.Tensor | None]:
    """Launch from the caller's stream and return the outputs; if memory runs out, release all CUDA graphs for it.

    Lanes wait for all streams that may still read earlier outputs of lanes, whose memory is free by now.

    Arguments:
        launcher: launches the program.
        inputs: of the program; the list is emptied.
        num_bytes: bytes of the buffers that it makes.
        may_repeat: whether it writes to nothing that a second launch reads.

    Raises:
        torch.OutOfMemoryError: the memory does not suffice.
    """
    gpu, stream = launcher.gpu, launcher.gpu.caller_stream()
    gpu.callers.add(stream)
    order_after(gpu, list(gpu.callers - {stream}), list(launcher.streams.values()))
    # To keep inputs for another launch takes memory, too.
    may_fail = any(gpu.captures) and gpu.free_bytes() < 2 * num_bytes
    spare = list(inputs) if may_fail and may_repeat else None
    try:
        return launcher.launch(inputs, stream)
    except torch.OutOfMemoryError:
        if spare is None or not gpu.captures.release():
            raise
        _logger.info(
            "%s releases all CUDA graphs of lanes, since it found no memory to run; use a smaller batch",
            launcher.program.name,
        )
    gpu.give_back_memory()
    return launcher.launch(spare, stream)


def _launch_body(
    launch: Launch, body: BodyFunction, values: dict[BufferId, torch.Tensor], gpu: Gpu, stream: Stream, before: Before
) -> Sequence[torch.Tensor]:
    """Launch a body on `stream` and return its outputs; they are added to `values`, from which it takes its inputs."""
    arguments = [values[buffer] for buffer in launch.inputs]
    before(launch, arguments, stream)
    for buffer, takes in zip(launch.inputs, launch.takes, strict=True):
        if takes:
            values.pop(buffer, None)  # a buffer that is read twice is taken twice
    made = gpu.call(body, arguments, stream)
    values.update(zip(launch.outputs, made, strict=True))
    return made
