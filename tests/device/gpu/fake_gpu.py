"""A stand-in for a GPU that keeps the rules of streams, events and CUDA graphs on CPU tensors.

Bodies run at once, but what the device would do is followed with vector clocks, and what it would refuse is refused:

* a wait for an event that nobody recorded, or that was recorded outside the capture it is waited for in,
* work in a capture on a stream that has not joined it, and a capture whose streams are not joined at its end,
* memory of a freed tensor that is used again on its stream before all readers are ordered before that (`races`),
* a tensor that is read before the launch that makes it is ordered before that (`races`).

A capture runs nothing and writes nothing. Its tensors are in an arena (`arena.py`), whose memory is used again as soon
as a tensor is freed, by the same capture or by another one that shares its pool. A replay reads and writes at the
addresses of the capture, whatever is there now; it fills with NaN what bodies use for a while, and what is freed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from apollo_compile.device.gpu.run.gpu import BodyFunction, Recording, Sharing
from apollo_compile.device.gpu.run.live_captures import LiveCaptures
from apollo_compile.ir import Lane
from tests.device.gpu.arena import Arena, Block, Pool, aliases, at_address, poison

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
    """Memory of one tensor: who made it and who reads it, at which time of which stream."""

    stream: str
    capture: object
    """The capture that allocated it; readers in another one run when that is replayed, on the caller's stream."""
    made_at: int
    readers: list[tuple[str, int]] = field(default_factory=list)


_Range = tuple[int, int]
"""An address and a number of bytes."""


@dataclass(eq=False)
class _Operation:
    """A captured launch; its tensors do not own what they refer to."""

    body: BodyFunction
    stream: str
    inputs: list[torch.Tensor]
    workspace: _Range
    """What the body uses while it runs."""
    freed_before: list[_Range]
    """What was freed since the launch before."""
    freed_within: list[_Range] = field(default_factory=list)
    """What the body frees: it may have been given its last inputs."""
    outputs: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Read and write at the addresses of the capture."""
        for freed in (*self.freed_before, self.workspace):
            poison(*freed)
        made = self.body(list(self.inputs))
        for freed in self.freed_within:
            poison(*freed)
        for target, value in zip(self.outputs, made, strict=True):
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)


@dataclass(eq=False)
class FakeRecording:
    """Captured launches, run again in the order of the host."""

    gpu: FakeGpu
    pool: Pool
    operations: list[_Operation] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    shares: Recording | None = None
    num_replays: int = 0
    freed: list[_Range] = field(default_factory=list)
    """What is freed after the last launch."""

    def replay(self) -> None:
        self.gpu.log.append(("replay",))
        self.num_replays += 1
        for operation in self.operations:
            operation.run()
        for freed in self.freed:
            poison(*freed)

    def bytes_of(self, stream: str) -> int:
        return self.pool.bytes_of(self.gpu.key_of(stream))


class FakeGpu:
    """See the top of the file; `log` has every operation in the order of the host, `races` those of all sharings."""

    def __init__(self, units: int = 132, arena: Arena | None = None) -> None:
        self.units = units
        self.arena = arena or Arena()
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
        self.fail_capture: Exception | None = None
        self.hidden: Callable[[], Sequence[torch.Tensor]] = lambda: ()
        """Returns what bodies write to besides their inputs."""
        self._capture: FakeRecording | None = None
        self._rehearsed: Pool | None = None
        """The memory of a rehearsal, while there is one."""
        self._clocks: dict[str, Counter[str]] = defaultdict(Counter)
        self._alive: dict[int, _Memory] = {}
        """Outputs of launches outside of captures, by identity."""
        self._made: dict[int, _Memory] = {}
        """Blocks of the arena that the capture makes or reads, by address."""
        self._freed: dict[str, list[_Memory]] = defaultdict(list)
        self.is_captured_by_user = False
        self.ns_by_stream: dict[str, int] = {}
        """How long a body takes on a stream; 1 us where it is not said."""
        self._now_ns = 0

    def caller_stream(self) -> str:
        return self.caller

    def lane_stream(self, lane: Lane) -> str | None:
        """Return a name for the lane."""
        return None if len(lane.units) == self.units else f"lane {lane.id}"

    def sharing(self, sharing: Sharing) -> FakeGpu:
        """Return another one, the same for the same sharing; at first lanes are apart."""
        if sharing not in self.others:
            self.others[sharing] = other = FakeGpu(self.units, self.arena)
            other.others, other.captures, other.races = self.others, self.captures, self.races
        return self.others[sharing]

    @property
    def num_replays(self) -> int:
        """Return how many CUDA graphs were replayed, however lanes share the device."""
        return sum(each.log.count(("replay",)) for each in self.others.values())

    def is_capturing(self) -> bool:
        return self.is_captured_by_user

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def new_timer(self) -> FakeEvent:
        """Return a new event; every event tells the time."""
        return FakeEvent()

    def elapsed_ns(self, begin: FakeEvent, end: FakeEvent) -> int:
        assert begin.clock is not None and end.clock is not None
        return end.at_ns - begin.at_ns

    @contextlib.contextmanager
    def random_numbers_kept(self) -> Iterator[None]:
        """Keep the generator of the CPU."""
        with torch.random.fork_rng(devices=[]):
            yield

    def record(self, event: FakeEvent, stream: str) -> None:
        self._enter(stream)
        self.log.append(("record", stream))
        event.clock, event.capture = Counter(self._clocks[stream]), self._capture
        event.at_ns = self._now_ns

    def wait(self, event: FakeEvent, stream: str) -> None:
        assert event.clock is not None, f"{stream} waits for an event that nobody recorded"
        assert event.capture is self._capture, f"{stream} waits for an event of another capture"
        if self._capture is not None:
            self._capture.joined.add(stream)
        self.log.append(("wait", stream))
        self._clocks[stream] |= event.clock

    def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: str) -> Sequence[torch.Tensor]:
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
            self._note_reader(self._memory_of(tensor), stream)
        if self._capture is not None:
            return self._call_in_capture(self._capture, body, inputs, stream)
        own = _addresses(inputs)
        outputs = list(body(inputs))
        if self._rehearsed is not None:
            made, outputs = outputs, self._place(outputs, own, self._rehearsed, stream)
            for tensor, value in zip(outputs, made, strict=True):
                if tensor is not value:
                    tensor.copy_(value)
        for tensor in outputs:
            if id(tensor) not in self._alive:
                self._alive[id(tensor)] = _Memory(stream, None, clock[stream])
                weakref.finalize(tensor, self._free, id(tensor))
        return outputs

    def free_bytes(self) -> int:
        return self.free

    def give_back_memory(self) -> None:
        self.log.append(("give back memory",))

    def capture(
        self,
        work: Callable[[str], None],
        shares: Recording | None,
        rehearsal: Callable[[str], None] | None = None,
        *,
        is_apart: bool = False,
    ) -> FakeRecording:
        """Capture; every stream has to come back to the origin, or that hides what `work` raises."""
        if self.fail_capture is not None:
            raise self.fail_capture
        pool = shares.pool if isinstance(shares, FakeRecording) else self.arena.new_pool()
        if rehearsal is not None:
            self._rehearse(rehearsal, None if is_apart else pool)
        self.log.append(("capture",))
        self._freed.clear()  # a capture allocates from memory of its own, ...
        for clock in list(self._clocks.values()):
            self._clocks[ORIGIN] |= clock  # ... and begins when the device has done everything
        recording = FakeRecording(self, pool, shares=shares)
        recording.joined.add(ORIGIN)
        self._capture = recording
        self.arena.on_free = self._free_block
        try:
            work(ORIGIN)
        finally:
            self._capture = None
            self._made.clear()
            self.arena.on_free = lambda pool, block: None
            self._freed.clear()
            end = self._clocks[ORIGIN]
            for stream in recording.joined:
                assert end[stream] >= self._clocks[stream][stream], f"{stream} is not joined at the end of the capture"
        self.recordings.append(recording)
        return recording

    def alias(self, tensors: Sequence[torch.Tensor], recording: Recording) -> list[torch.Tensor]:
        """Return tensors at the same addresses that keep the recording, and with it the pool, alive."""
        return aliases(tensors, recording)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if targets:
            self.log.append(("copy", str(len(targets))))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def synchronize(self) -> None:
        """Everything has happened."""

    def _rehearse(self, rehearsal: Callable[[str], None], pool: Pool | None) -> None:
        """Run it in memory of the pool, if any, after what the caller's stream has to do and before what comes."""
        self.log.append(("rehearse",))
        freed, self._freed = self._freed, defaultdict(list)
        self._clocks[ORIGIN] |= self._clocks[self.caller]
        self._rehearsed = pool
        try:
            rehearsal(ORIGIN)
        finally:
            self._rehearsed = None
        self._clocks[self.caller] |= self._clocks[ORIGIN]
        self._freed = freed

    def _enter(self, stream: str) -> None:
        assert self._capture is None or stream in self._capture.joined, f"{stream} is not part of the capture"

    def key_of(self, stream: str) -> object:
        """Return what tells the stream from those of the same name of other ways to share the device."""
        return stream if stream in (CALLER, ORIGIN) else (id(self), stream)

    def _name_of(self, key: object) -> str:
        """Return the stream with this key; another name than those of all streams if it is not of this device."""
        if isinstance(key, str):
            return key
        assert isinstance(key, tuple)
        return str(key[1] if key[0] == id(self) else key)

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        """Return what is known of the memory of a tensor of this capture, or of one outside of captures."""
        if self._capture is None:
            return self._alive.get(id(tensor))
        address = tensor.untyped_storage().data_ptr()
        block = self._capture.pool.owned.get(address)
        if block is not None and address not in self._made:  # an earlier capture made it, which is over
            self._made[address] = _Memory(self._name_of(block.stream), self._capture, 0)
        return None if block is None else self._made[address]

    def _note_reader(self, memory: _Memory | None, stream: str) -> None:
        if memory is None:
            return
        clock = self._clocks[stream]
        if clock[memory.stream] < memory.made_at:
            self.races.append(f"{stream} reads what {memory.stream} may not have written yet")
        memory.readers.append((stream, clock[stream]))

    def _free(self, key: int) -> None:
        memory = self._alive.pop(key)
        if self._capture is None:
            self._freed[memory.stream].append(memory)

    def _free_block(self, pool: Pool, block: Block) -> None:
        """Note that a block is freed while something is captured."""
        capture, memory = self._capture, self._made.pop(block.address, None)
        if capture is None or pool is not capture.pool:
            return
        capture.freed.append((block.address, block.num_bytes))
        if memory is not None:
            self._freed[memory.stream].append(memory)

    def _call_in_capture(
        self, capture: FakeRecording, body: BodyFunction, inputs: list[torch.Tensor], stream: str
    ) -> Sequence[torch.Tensor]:
        read = [at_address(tensor) for tensor in inputs]
        hidden = self.others[Sharing.APART].hidden()
        before = [tensor.clone() for tensor in (*read, *hidden)]
        workspace = capture.pool.allocate(self.key_of(stream), sum(tensor.nbytes for tensor in read))
        operation = _Operation(body, stream, read, (workspace.address, workspace.num_bytes), capture.freed)
        capture.operations.append(operation)
        capture.freed = operation.freed_within
        state = torch.get_rng_state()
        made = list(body(inputs))
        torch.set_rng_state(state)
        for tensor, value in zip((*read, *hidden), before, strict=True):
            tensor.copy_(value)
        capture.pool.free(workspace)
        capture.freed = []
        outputs = self._place(made, _addresses(read), capture.pool, stream)
        for tensor, value in zip(outputs, made, strict=True):
            if tensor is not value:
                address = tensor.untyped_storage().data_ptr()
                self._made[address] = _Memory(stream, capture, self._clocks[stream][stream])
        operation.outputs = [at_address(tensor) for tensor in outputs]
        return outputs

    def _place(self, made: Sequence[torch.Tensor], own: frozenset[int], pool: Pool, stream: str) -> list[torch.Tensor]:
        """Return the tensors in the pool, but for views of the storages `own`."""
        new = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in own]
        placed = dict(zip(map(id, new), self.arena.tensors_like(new, pool, self.key_of(stream)), strict=True))
        return [placed.get(id(tensor), tensor) for tensor in made]


def _addresses(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the addresses of the storages."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
