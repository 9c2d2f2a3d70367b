"""All CUDA graphs on a device: their release frees their memory, and `turn_off` ends captures for good."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Protocol

_logger = logging.getLogger(__name__)


class LiveCapture(Protocol):
    """A CUDA graph with its memory, which it has until it is released."""

    @property
    def is_live(self) -> bool:
        """Return whether it still has its memory."""

    def release(self) -> None:
        """Free the graph and its memory."""


class LiveCaptures:
    """The CUDA graphs on one device, of all models; guarded by `Gpu.launch_lock`."""

    def __init__(self) -> None:
        self.why_off: str | None = None
        """Why nothing is captured on the device for the rest of the process; None while captures work."""
        self._captures: weakref.WeakSet[LiveCapture] = weakref.WeakSet()

    def __iter__(self) -> Iterator[LiveCapture]:
        return (each for each in list(self._captures) if each.is_live)

    def add(self, captured: LiveCapture) -> None:
        """Remember a CUDA graph, for as long as somebody else refers to it."""
        self._captures.add(captured)

    def release(self) -> bool:
        """Release every CUDA graph with its memory, and return whether there was any."""
        found = list(self)
        for captured in found:
            captured.release()
        return bool(found)

    def turn_off(self, reason: str) -> None:
        """Release everything, and capture nothing on the device for the rest of the process; log one warning."""
        self.release()
        if self.why_off is None:
            self.why_off = reason
            _logger.warning("lanes are off for the rest of this process: %s", reason)
