"""CUDA graphs that are alive, with their memory: those of a model, and those of a device.

ModelMemory     what the graphs of one model share; its release drops their CUDA graphs
LiveCaptures    all CUDA graphs on a device; its release drops them, and `turn_off` ends captures for good
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from apollo_compile.ir import Role

if TYPE_CHECKING:
    from apollo_compile.device.gpu.captured import Captured
    from apollo_compile.device.gpu.gpu import Stream

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ModelMemory:
    """State that the graphs of one model share."""

    stream: Stream | None = None
    """The caller's stream at the last replay of any of them."""
    has_hooks: bool = False
    """Whether `saved_tensors_hooks` were active at the last forward, so that they may replace what it saved."""
    out_of_memory: str | None = None
    """The message of the allocation that failed in a capture; no graph of the model is captured after that."""
    _captures: list[Captured] = field(default_factory=list)

    def add(self, captured: Captured) -> None:
        """Remember a CUDA graph of one of the graphs."""
        self._captures = [captured, *(each for each in self._captures if each.is_live)]

    @property
    def forwards(self) -> tuple[Captured, ...]:
        """The captured forwards, the latest first."""
        return tuple(each for each in self._captures if each.is_live and each.role is Role.FORWARD)

    def release(self) -> None:
        """Release every CUDA graph of the model, with its memory."""
        for captured in self._captures:
            captured.release()
        self._captures.clear()


class LiveCaptures:
    """The CUDA graphs on one device, of all models; guarded by `Gpu.launch_lock`."""

    def __init__(self) -> None:
        self.why_off: str | None = None
        """Why nothing is captured on the device for the rest of the process; None while captures work."""
        self._captures: weakref.WeakSet[Captured] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Captured]:
        return (each for each in list(self._captures) if each.is_live)

    def add(self, captured: Captured) -> None:
        """Remember a CUDA graph, for as long as somebody else refers to it."""
        self._captures.add(captured)

    def release(self) -> bool:
        """Release every CUDA graph with its memory, and return whether there was any."""
        found = list(self)
        for captured in found:
            captured.release()
        return bool(found)

    def turn_off(self, reason: str) -> None:
        """Release everything and capture nothing on the device for the rest of the process; warn of it once."""
        self.release()
        if self.why_off is None:
            self.why_off = reason
            _logger.warning("lanes are off for the rest of this process: %s", reason)
