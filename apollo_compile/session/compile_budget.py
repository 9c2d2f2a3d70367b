"""Whether compiling something more, only to compare it, is a small share of the time that a loop has trained."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_NS = 60_000_000_000
"""A longer pause between two steps is idle time, such as a night in which a notebook waits, but for so much of it."""


class CompileBudget:
    """The time that a loop has trained, and what of it compiles took."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._spent_ns = 0
        self.restart()

    def restart(self) -> None:
        """Begin to count the time that the loop trains."""
        self._trained_ns, self._last_ns = 0, self._clock()

    def note_step(self) -> None:
        """Note that a step begins."""
        now = self._clock()
        self._trained_ns += min(now - self._last_ns, MOST_NS)
        self._last_ns = now

    def spend(self, ns: int) -> None:
        """Note how long steps waited for a compile."""
        self._spent_ns += ns

    def allows(self, cost_ns: int, share: float) -> bool:
        """Whether so much more would still be this share of the training time at most."""
        return self._spent_ns + cost_ns <= share * self._trained_ns
