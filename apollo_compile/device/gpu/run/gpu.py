"""The one interface to the GPU: streams, events, captures. All other code for lanes on a GPU is ordinary Python.

`Gpu` is the interface that the executor uses, `TorchGpu` implements it with torch.cuda and lanes of the native runtime
(`torch_capture.py` captures).
Tests use a fake that enforces the rules of streams and CUDA graphs on CPU tensors, so the order of all operations is
tested without a GPU.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from apollo_compile import _native
from apollo_compile.device.gpu.run.live_captures import LiveCaptures
from apollo_compile.device.gpu.run.torch_capture import TorchRecording, alias_tensors, capture_with_torch
from apollo_compile.errors import CudaError
from apollo_compile.ir import Lane
from apollo_compile.target.lanes import atom_borders
from apollo_compile.torch_bridge.cuda_private import units_left_out
from apollo_compile.units import NS_PER_MS

Stream = Any
Event = Any
BodyFunction = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Sharing(enum.Enum):
    """A way in which lanes share the device."""

    APART = enum.auto()
    """A lane has the units that the plan gives it, and no others."""
    FREE = enum.auto()
    """It may use every unit."""


class Recording(Protocol):
    """A captured CUDA graph; its memory stays allocated as long as the recording exists."""

    def replay(self) -> None:
        """Replay it, in order with the caller's stream."""

    def bytes_of(self, stream: Stream) -> int:
        """Return the bytes of device memory allocated on a lane's stream during the capture."""


class Gpu(Protocol):
    """The interface of a device that lanes use."""

    @property
    def launch_lock(self) -> threading.RLock:
        """Held while launching: all programs share the lanes' streams, and torch captures one CUDA graph at a time."""

    @property
    def callers(self) -> set[Stream]:
        """Streams that lanes were launched from, and that may use their outputs; guarded by `launch_lock`."""

    @property
    def captures(self) -> LiveCaptures:
        """The CUDA graphs on the device; guarded by `launch_lock`."""

    def caller_stream(self) -> Stream:
        """Return the caller's current stream."""

    def lane_stream(self, lane: Lane) -> Stream | None:
        """Return the stream of a lane; None for one with every unit, which is the caller's own stream."""

    def sharing(self, sharing: Sharing) -> Gpu:
        """Return the same device with lanes that share it in this way; every call returns the same object."""

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured."""

    def new_event(self) -> Event:
        """Return a new event."""

    def new_timer(self) -> Event:
        """Return a new event with timing; if recorded in a capture, every replay records it again."""

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Return the nanoseconds between two completed timers."""

    def random_numbers_kept(self) -> contextlib.AbstractContextManager[None]:
        """Restore the state of random number generators at the end of a `with`."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record `event` behind everything launched on `stream` so far."""

    def wait(self, event: Event, stream: Stream) -> None:
        """Make later launches on `stream` wait for `event`."""

    def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: Stream) -> Sequence[torch.Tensor]:
        """Launch a body on `stream`, with libraries limited to the units of its lane; it empties `inputs`."""

    def capture(
        self,
        work: Callable[[Stream], None],
        shares: Recording | None,
        rehearsal: Callable[[Stream], None] | None = None,
        *,
        is_apart: bool = False,
    ) -> Recording:
        """Capture the launches of `work(origin)` from the stream `origin`, without running them.

        Arguments:
            work: makes the launches that are captured.
            shares: an earlier recording, whose free memory is reused.
            rehearsal: launches the same on other data; run before, on the streams and in the memory of the capture.
            is_apart: whether the rehearsal takes other memory.

        Raises:
            Exception: whatever `work` and `rehearsal` raise.
            torch.OutOfMemoryError: the memory does not suffice.
            RuntimeError: the capture failed.
        """

    def alias(self, tensors: Sequence[torch.Tensor], recording: Recording) -> list[torch.Tensor]:
        """Return tensors at the same addresses that keep `recording` alive, but do not own their memory.

        Once `tensors` are released, later captures that share the pool may use their memory. Tensors that share a
        storage do so in the result.
        """

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can still be allocated, roughly."""

    def give_back_memory(self) -> None:
        """Return memory of the process that nothing uses to the device."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target, on the caller's stream."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""


def open_device(ordinal: int) -> _native.CudaDevice:
    """Return the native device with its atoms.

    Raises:
        CudaError: there is no driver, no such device, or the driver is too old for lanes.
    """
    return _native.cuda_device(ordinal)


def require_cuda() -> None:
    """Check that torch sees a GPU.

    Raises:
        CudaError: it does not; the message says what to do.
    """
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise CudaError(f"no GPU: {why}; lanes on a GPU need an NVIDIA GPU, its driver, and torch built for CUDA")


def atoms_of(lane: Lane, sizes: Sequence[int]) -> list[int]:
    """Return the indices of a lane's atoms, given the sizes of all atoms.

    Raises:
        ValueError: the lane has only a part of an atom.
    """
    units = set(lane.units)
    ranges = [range(first, last) for first, last in itertools.pairwise(atom_borders(sizes))]
    atoms = [index for index, each in enumerate(ranges) if not units.isdisjoint(each)]
    if [unit for index in atoms for unit in ranges[index]] != list(lane.units):
        raise ValueError(f"lane {lane.id} has units {list(lane.units)}; a lane has whole atoms of {list(sizes)} units")
    return atoms


@functools.cache
def _shared_state(ordinal: int) -> tuple[threading.RLock, set[Stream], LiveCaptures]:
    """Return the state that all programs on a device share: `Gpu.launch_lock`, `Gpu.callers` and `Gpu.captures`."""
    return threading.RLock(), set(), LiveCaptures()


_ORIGIN = 0
"""Number of the plain stream on which captures begin and end; lane 0 has none, since it is the caller's own."""


class TorchGpu:
    """The GPU of that number, as torch and the driver see it."""

    def __init__(self, ordinal: int, sharing: Sharing = Sharing.APART) -> None:
        """Open the device.

        Raises:
            CudaError: there is no driver, no such device, or the driver is too old for lanes.
        """
        self.device = torch.device("cuda", ordinal)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.native = open_device(ordinal)
        self._sharing = sharing
        self._streams: dict[Lane, Stream] = {}
        self._left_out: dict[int, int] = {}
        """Number of SMs outside a lane, by the handle of its stream."""
        self._others: dict[Sharing, TorchGpu] = {sharing: self}
        self.launch_lock, self.callers, self.captures = _shared_state(ordinal)

    def caller_stream(self) -> Stream:
        """Return torch's current stream of the device."""
        return torch.cuda.current_stream(self.device)

    def lane_stream(self, lane: Lane) -> Stream | None:
        """Return the stream of the lane's green context, or a plain one."""
        if len(lane.units) == self.native.num_sms:
            return None
        if lane not in self._streams:
            is_apart = self._sharing is Sharing.APART
            self._streams[lane] = self._wrap(self._isolated(lane) if is_apart else self.native.stream(lane.id))
        return self._streams[lane]

    def sharing(self, sharing: Sharing) -> TorchGpu:
        """Return the device with other streams as lanes; every call returns the same object."""
        if sharing not in self._others:
            self._others[sharing] = other = TorchGpu(self.device.index, sharing)
            other._others = self._others
        return self._others[sharing]

    def _isolated(self, lane: Lane) -> int:
        """Return the CUstream of the lane's green context, which has exactly its SMs."""
        atoms = atoms_of(lane, self.native.atom_sizes)
        native = self.native.lane(atoms)
        expected = sum(self.native.atom_sizes[atom] for atom in atoms)
        if native.num_sms != expected:
            raise CudaError(
                f"lane {lane.id} was granted {native.num_sms} SMs instead of {expected} on {self.native.name}; turn "
                "'device.cuda_lanes' off and report the output of 'apollo doctor'"
            )
        self._left_out[native.stream] = self.native.num_sms - native.num_sms
        return native.stream

    def _wrap(self, handle: int) -> Stream:
        """Return torch's view of a stream of the runtime.

        Streams of torch itself come from a pool of 32: one of them may also be a stream of the user, or of collectives.
        """
        return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def is_capturing(self) -> bool:
        """Whether torch's current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def new_event(self) -> Event:
        """Return an event without timing, which is cheaper."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def new_timer(self) -> Event:
        """Return an event that becomes a node of a captured graph."""
        return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Return the time between two timers, with a resolution of half a microsecond."""
        elapsed_ms: float = begin.elapsed_time(end)
        return round(elapsed_ms * NS_PER_MS)

    @contextlib.contextmanager
    def random_numbers_kept(self) -> Iterator[None]:
        """Restore the generators of the CPU and of this device."""
        with torch.random.fork_rng(devices=[self.device]):
            yield

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event."""
        event.record(stream)

    def wait(self, event: Event, stream: Stream) -> None:
        """Make the stream wait."""
        stream.wait_event(event)

    def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: Stream) -> Sequence[torch.Tensor]:
        """Call the body with `stream` as torch's current one; the primary context stays current."""
        with torch.cuda.stream(stream), units_left_out(self._left_out.get(stream.cuda_stream, 0)):
            return body(inputs)

    def capture(
        self,
        work: Callable[[Stream], None],
        shares: Recording | None,
        rehearsal: Callable[[Stream], None] | None = None,
        *,
        is_apart: bool = False,
    ) -> TorchRecording:
        """Capture with torch's own class, which handles random numbers and the memory pool."""
        origin = self._wrap(self.native.stream(_ORIGIN))
        lanes = (stream for gpu in self._others.values() for stream in gpu._streams.values())
        return capture_with_torch(
            work,
            rehearsal,
            is_apart=is_apart,
            device=self.device,
            pool=shares.pool if isinstance(shares, TorchRecording) else None,
            origin=origin,
            streams={stream.cuda_stream for stream in (origin, *lanes)},
            captures=self.captures,
        )

    def alias(self, tensors: Sequence[torch.Tensor], recording: Recording) -> list[torch.Tensor]:
        """Make storages from bare addresses."""
        assert isinstance(recording, TorchRecording)
        return alias_tensors(tensors, recording)

    def free_bytes(self) -> int:
        """Return the free bytes of the driver, and those that torch's allocator keeps without use."""
        free, _ = self.native.memory()
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def give_back_memory(self) -> None:
        """Empty the cache of torch's allocator."""
        torch.cuda.empty_cache()

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy with as few launches as torch can."""
        if targets:
            torch._foreach_copy_(list(targets), list(sources))

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)
