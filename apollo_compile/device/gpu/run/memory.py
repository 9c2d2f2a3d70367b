"""The memory that the CUDA graphs of one model share, and which of them are alive; its release drops them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from apollo_compile.device.gpu.run.captured import Captured
from apollo_compile.device.gpu.run.gpu import Gpu, Recording, Stream
from apollo_compile.ir import Role

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ModelMemory:
    """The memory pool that CUDA graphs of one model share, and its state.

    Forwards and backwards of all variants use the same addresses, so a replay overwrites outputs of others. A replay of
    a forward requires that no output in the pool is in use; a replay of a backward requires that
    the last one was that of its own forward. Graphs without a backward have a pool of their own.
    """

    stream: Stream | None = None
    """The caller's stream at the last replay of any of them."""
    has_hooks: bool = False
    """Whether `saved_tensors_hooks` were active at the last forward, so that they may replace its saved tensors."""
    out_of_memory: str | None = None
    """The message of the allocation that failed in a capture; no graph of the model is captured after that."""
    failure: str | None = None
    """Why a graph of the model cannot be a CUDA graph; None if none was refused."""
    why_copied: str | None = None
    """Why gradients are copied out of CUDA graphs, until the process ends; None while they are lent."""
    _captures: list[Captured] = field(default_factory=list)
    _contents: Captured | None = None
    """The forward that was replayed last, if nothing was replayed after it."""
    _handed_out: list[Captured] = field(default_factory=list)
    """The CUDA graphs whose outputs may still be in use."""

    def add(self, captured: Captured) -> None:
        """Remember a CUDA graph of the model."""
        self._captures = [captured, *(each for each in self._captures if each.is_live)]

    @property
    def forwards(self) -> tuple[Captured, ...]:
        """The captured forwards, the latest first."""
        return tuple(each for each in self._captures if each.is_live and each.role is Role.FORWARD)

    @property
    def contents(self) -> Captured | None:
        """The forward whose saved tensors are in the pool; None if anything else was replayed after it."""
        return self._contents if self._contents is not None and self._contents.is_live else None

    def find_pool(self) -> Recording | None:
        """Return a CUDA graph whose pool the next capture shares; None if that begins a new pool."""
        recording = next((each.recording for each in self._captures if each.recording is not None), None)
        if recording is None:
            self._forget_pool()
        return recording

    def is_free(self) -> bool:
        """Whether no output in the pool is in use."""
        return all(captured.is_unused() for captured in self._handed_out)

    def lends_gradients(self) -> bool:
        """Whether the caller uses a gradient in the memory of a CUDA graph."""
        return any(each.role is Role.BACKWARD and not each.is_unused() for each in self._handed_out)

    def copy_gradients(self, reason: str) -> None:
        """Copy gradients out of CUDA graphs from now on, and release those that lend; log the first reason."""
        if self.why_copied is None:
            self.why_copied = reason
            _logger.info("gradients are copied out of CUDA graphs: %s", reason)
            self.release()

    def note_replay(self, captured: Captured) -> None:
        """Note that a CUDA graph is replayed, which hands out its outputs."""
        if captured.role is Role.BACKWARD:
            self._contents = None
            self._handed_out.append(captured)
        else:
            # A hook may keep saved tensors for later, and a backward overwrites them.
            self._contents = captured if captured.role is Role.FORWARD and not self.has_hooks else None
            self._handed_out = [captured]

    def follow(self, gpu: Gpu) -> None:
        """Make the caller's stream wait for the stream of the last replay, which uses the same memory."""
        stream, last = gpu.caller_stream(), self.stream
        if last is not None and last != stream:
            event = gpu.new_event()
            gpu.record(event, last)
            gpu.wait(event, stream)
        self.stream = stream

    def drop(self, captured: Captured) -> None:
        """Release a CUDA graph; if its outputs are in use, with all others of the pool, which might overwrite them."""
        if captured.is_unused():
            captured.release()
        else:
            self.release()

    def release(self) -> None:
        """Release every CUDA graph of the model, with the pool; outputs in use keep their memory."""
        for captured in self._captures:
            captured.release()
        self._captures.clear()
        self._forget_pool()

    def _forget_pool(self) -> None:
        self._contents = None
        self._handed_out.clear()
