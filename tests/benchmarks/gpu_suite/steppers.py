"""Processes of variants that do nothing, each in its way."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

NS = 1_000_000


class Fine:
    """Answers everything."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._name = order["variant"]["name"]

    def start(self) -> float:
        return 1.5

    def warm_up(self, steps: int, limit_s: float) -> dict[str, Any]:
        return {"steps": steps, "is_settled": limit_s > 0}

    def losses(self) -> list[float]:
        return [1.0, 0.5]

    def memory(self) -> dict[str, int]:
        return {"peak_bytes": 200, "warm_bytes": 100}

    def launch_times(self) -> dict[str, int | None]:
        return {"host_ns": 10, "cpu_ns": 20, "device_ns": None}

    def decided(self) -> dict[str, Any]:
        return {"ran": [self._name]}

    def replays(self) -> list[dict[str, Any]]:
        return []

    def loop(self, steps: int) -> int:
        return steps * NS

    def run(self, untimed: int, timed: int) -> list[int]:
        return timed * [2 * NS]


class Dies(Fine):
    """Ends in the midst of its second turn."""

    _num_loops = 0

    def loop(self, steps: int) -> int:
        self._num_loops += 1
        if self._num_loops == 2:
            print("an illegal memory access was encountered", flush=True)
            os._exit(9)
        return super().loop(steps)


class Hangs(Fine):
    """Never takes its first step."""

    def start(self) -> float:
        threading.Event().wait()
        return 0.0


class Fails(Fine):
    """Cannot tell its memory."""

    def memory(self) -> dict[str, int]:
        raise RuntimeError("no allocator")


class Breaks(Fine):
    """Cannot begin."""

    def start(self) -> float:
        raise RuntimeError("CUDA out of memory\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace")


class Patient(Fine):
    """Says how long its comparison may take."""

    def start(self) -> float:
        return 30.0

    def warm_up(self, steps: int, limit_s: float) -> dict[str, Any]:
        return {"steps": steps, "limit_s": limit_s}


class Looker(Fine):
    """Checks of a device, of which one ends the process and one hangs."""

    def start(self) -> dict[str, Any]:  # type: ignore[override]
        return {"gpu": "Fake GPU", "pid": os.getpid()}

    def rates(self) -> dict[str, float]:
        return {"copy_bytes_per_s": 1e12}

    def check(self, name: str) -> dict[str, Any]:
        if name == "dies":
            os._exit(9)
        if name == "hangs":
            threading.Event().wait()
        numbers = {"error": "it raised"} if name == "raises" else {"pid": os.getpid()}
        state = "failed" if name == "raises" else "ok"
        return {"name": name, "state": state, "text": name, "numbers": numbers}
