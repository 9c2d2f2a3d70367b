"""How long pieces of work take on a device, without waiting for it in between.

A CPU is timed by the clock of the host. On a CUDA device events are recorded on the current stream, and read at the
end. Any other device has to be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch

from apollo_compile.units import NS_PER_MS


class Stopwatch:
    """Times pieces of work of this thread, one after the other, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(device)
        self._begin: Any = None
        self._spans: list[tuple[Hashable, Any, Any]] = []

    def begin(self) -> None:
        """Begin a piece."""
        self._begin = self._now()

    def end(self, key: Hashable) -> None:
        """End the piece that began last."""
        self._spans.append((key, self._begin, self._now()))

    def read(self) -> list[tuple[Hashable, int]]:
        """Return keys and nanoseconds of the pieces since the last call; waits until the device has done them."""
        spans, self._spans = self._spans, []
        if self._device.type != "cuda":
            return [(key, end - begin) for key, begin, end in spans]
        if spans:
            spans[-1][2].synchronize()
        return [(key, round(begin.elapsed_time(end) * NS_PER_MS)) for key, begin, end in spans]

    def clear(self) -> None:
        """Forget the pieces since the last reading."""
        self._spans = []

    def _now(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter_ns()
