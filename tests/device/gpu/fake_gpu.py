"""A stand-in for a GPU that keeps the rules of streams, events and CUDA graphs on CPU tensors.

Bodies run at once, but what the device would do is followed with vector clocks, and what it would refuse is refused:

* a wait for an event that nobody recorded, or that was recorded outside the capture it is waited for in,
* work in a capture on a stream that has not joined it, and a capture whose streams are not joined at its end,
* memory of a freed tensor that is used again on its stream before all readers are ordered before that (`races`).

A capture runs nothing: outputs hold poison until a replay fills them, always at the same addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from apollo_compile.device.gpu.gpu import Body, Recording, Sharing
from apollo_compile.device.gpu.memory import LiveCaptures
from apollo_compile.ir import Lane

CALLER = "caller"
ORIGIN = "origin of the capture"


@dataclass(eq=False)
class FakeEvent:
    """An event: what was ordered before it, and in which capture it was recorded."""

    clock: Counter[str] | None = None
    at_ns: int = 0
    capture: object = None


@dataclass(eq=False)
class _Memory:
    """Memory of one tensor: who reads it, at which time of which stream."""

    stream: str
    capture: object
    """The capture that allocated it; readers in another one run when that is replayed, on the caller's stream."""
    readers: list[tuple[str, int]] = field(default_factory=list)


@dataclass(eq=False)
class FakeRecording:
    """Bodies with the tensors that they read and write, run again in the order of the host."""

    gpu: FakeGpu
    operations: list[tuple[Body, list[torch.Tensor], list[torch.Tensor], str]] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    shares: Recording | None = None
    num_replays: int = 0

    def replay(self) -> None:
        """Poison what it writes, then run."""
        self.gpu.log.append(("replay",))
        self.num_replays += 1
        for _, inputs, outputs, _ in self.operations:
            _poison(outputs, inputs)
        for body, inputs, outputs, _ in self.operations:
            for target, made in zip(outputs, body(list(inputs)), strict=True):
                if target.data_ptr() != made.data_ptr():
                    target.copy_(made)

    def bytes_of(self, stream: str) -> int:
        """Return the bytes of the outputs on the stream."""
        return sum(
            t.numel() * t.element_size() for _, _, outputs, on in self.operations for t in outputs if on == stream
        )


class FakeGpu:
    """See the top of the file; `log` has every operation in the order of the host."""

    def __init__(self, units: int = 132) -> None:
        self.units = units
        self.log: list[tuple[str, ...]] = []
        self.races: list[str] = []
        self.recordings: list[FakeRecording] = []
        self.caller = CALLER
        self.launch_lock = threading.RLock()
        self.callers: set[str] = set()
        self.captures = LiveCaptures()
        self.free = 1 << 40
        """Bytes that can be allocated, for who asks."""
        self.others: dict[Sharing, FakeGpu] = {Sharing.APART: self}
        self.urgency: dict[str, int] = {}
        """By stream, as it was last asked for."""
        self.fail_capture: Exception | None = None
        self._capture: FakeRecording | None = None
        self._clocks: dict[str, Counter[str]] = defaultdict(Counter)
        self._alive: dict[int, _Memory] = {}
        self._freed: dict[str, list[_Memory]] = defaultdict(list)
        self.is_captured_by_user = False
        self.ns_by_stream: dict[str, int] = {}
        """How long a body takes on a stream; 1 us where it is not said."""
        self._now_ns = 0

    def caller_stream(self) -> str:
        """Return the caller's stream."""
        return self.caller

    def lane_stream(self, lane: Lane, urgency: int = 0) -> str | None:
        """Return a name for the lane."""
        if len(lane.units) == self.units:
            return None
        self.urgency[f"lane {lane.id}"] = urgency
        return f"lane {lane.id}"

    def sharing(self, sharing: Sharing) -> FakeGpu:
        """Return another one, the same for the same sharing; at first lanes are apart."""
        if sharing not in self.others:
            self.others[sharing] = other = FakeGpu(self.units)
            other.others, other.captures = self.others, self.captures
        return self.others[sharing]

    def is_capturing(self) -> bool:
        """Whether a test says that the user captures."""
        return self.is_captured_by_user

    def new_event(self) -> FakeEvent:
        """Return a new event."""
        return FakeEvent()

    def new_timer(self) -> FakeEvent:
        """Return a new event; every event tells the time."""
        return FakeEvent()

    def elapsed_ns(self, begin: FakeEvent, end: FakeEvent) -> int:
        """Return the time between them."""
        assert begin.clock is not None and end.clock is not None
        return end.at_ns - begin.at_ns

    @contextlib.contextmanager
    def random_numbers_kept(self) -> Iterator[None]:
        """Keep the generator of the CPU."""
        with torch.random.fork_rng(devices=[]):
            yield

    def record(self, event: FakeEvent, stream: str) -> None:
        """Keep the stream's clock."""
        self._enter(stream)
        self.log.append(("record", stream))
        event.clock, event.capture = Counter(self._clocks[stream]), self._capture
        event.at_ns = self._now_ns

    def wait(self, event: FakeEvent, stream: str) -> None:
        """Take the event's clock over."""
        assert event.clock is not None, f"{stream} waits for an event that nobody recorded"
        assert event.capture is self._capture, f"{stream} waits for an event of another capture"
        if self._capture is not None:
            self._capture.joined.add(stream)
        self.log.append(("wait", stream))
        self._clocks[stream] |= event.clock

    def call(self, body: Body, inputs: list[torch.Tensor], stream: str) -> Sequence[torch.Tensor]:
        """Run the body; in a capture, keep what it reads and writes, and undo it."""
        self._enter(stream)
        self.log.append(("launch", stream))
        self._now_ns += self.ns_by_stream.get(stream, 1_000)
        clock = self._clocks[stream]
        clock[stream] += 1
        for memory in self._freed.pop(stream, []):  # what a new tensor of this stream may be given
            for reader, time in memory.readers:
                if clock[reader] < time:
                    self.races.append(f"memory of {stream} is used again while {reader} reads it")
        for tensor in inputs:
            if id(tensor) in self._alive and self._alive[id(tensor)].capture is self._capture:
                self._alive[id(tensor)].readers.append((stream, clock[stream]))
        outputs = list(
            body(inputs) if self._capture is None else self._call_in_capture(self._capture, body, inputs, stream)
        )
        for tensor in outputs:
            if id(tensor) not in self._alive:
                self._alive[id(tensor)] = _Memory(stream, self._capture)
                weakref.finalize(tensor, self._free, id(tensor))
        return outputs

    @contextlib.contextmanager
    def on_lane(self, lane: Lane) -> Iterator[None]:
        """Note it."""
        self.log.append(("enter lane", str(len(lane.units))))
        yield
        self.log.append(("leave lane", str(len(lane.units))))

    def free_bytes(self) -> int:
        """Return what a test says."""
        return self.free

    def give_back_memory(self) -> None:
        """Note it."""
        self.log.append(("give back memory",))

    def capture(
        self, work: Callable[[str], None], shares: Recording | None, rehearsal: Callable[[str], None] | None = None
    ) -> FakeRecording:
        """Capture; every stream has to come back to the origin, or that hides what `work` raises."""
        if self.fail_capture is not None:
            raise self.fail_capture
        if rehearsal is not None:
            self._rehearse(rehearsal)
        self.log.append(("capture",))
        self._freed.clear()  # a capture allocates from memory of its own, ...
        for clock in list(self._clocks.values()):
            self._clocks[ORIGIN] |= clock  # ... and begins when the device has done everything
        recording = FakeRecording(self, shares=shares)
        recording.joined.add(ORIGIN)
        self._capture = recording
        try:
            work(ORIGIN)
        finally:
            self._capture = None
            self._freed.clear()
            end = self._clocks[ORIGIN]
            for stream in recording.joined:
                assert end[stream] >= self._clocks[stream][stream], f"{stream} is not joined at the end of the capture"
        self.recordings.append(recording)
        return recording

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy."""
        if targets:
            self.log.append(("copy", str(len(targets))))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def synchronize(self) -> None:
        """Everything has happened."""

    def _rehearse(self, rehearsal: Callable[[str], None]) -> None:
        """Run it in memory of its own, after what the caller's stream has to do and before what comes."""
        self.log.append(("rehearse",))
        freed, self._freed = self._freed, defaultdict(list)
        self._clocks[ORIGIN] |= self._clocks[self.caller]
        rehearsal(ORIGIN)
        self._clocks[self.caller] |= self._clocks[ORIGIN]
        self._freed = freed

    def _enter(self, stream: str) -> None:
        assert self._capture is None or stream in self._capture.joined, f"{stream} is not part of the capture"

    def _free(self, key: int) -> None:
        memory = self._alive.pop(key)
        self._freed[memory.stream].append(memory)

    def _call_in_capture(
        self, capture: FakeRecording, body: Body, inputs: list[torch.Tensor], stream: str
    ) -> Sequence[torch.Tensor]:
        read = [_by_address(tensor) for tensor in inputs]
        before = [tensor.clone() for tensor in read]
        state = torch.get_rng_state()
        outputs = list(body(inputs))
        torch.set_rng_state(state)
        _poison(outputs, read)
        for tensor, value in zip(read, before, strict=True):
            tensor.copy_(value)
        own = {tensor.untyped_storage().data_ptr() for tensor in read}
        written = [_by_address(t) if t.untyped_storage().data_ptr() in own else t.detach() for t in outputs]
        capture.operations.append((body, read, written, stream))
        return outputs


def _by_address(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address that does not keep the memory alive, as a captured kernel does not."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor.detach()
    bytes_there = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(bytes_there, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def _poison(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Make everything written wrong, but for views of what is read."""
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for tensor in outputs:
        if tensor.untyped_storage().data_ptr() not in own:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
