"""Share of the training time that compiles may take which only serve a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_STEP_NS = 60_000_000_000
"""Longest gap between steps that counts as training time."""


class CompileBudget:
    """Time that a loop has trained, and time that compiles took of it."""

    def __init__(self, share: float, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """Allow compiles this share of the training time; 0 allows none."""
        self._share = share
        self._clock = clock
        self._spent_ns = self._trained_ns = 0
        self._last_ns: int | None = None

    def begin(self) -> None:
        """Count time as training time from now on, if it is not counted yet: compiles come before."""
        if self._last_ns is None:
            self._last_ns = self._clock()

    def note_steps(self, count: int = 1) -> None:
        """Add the time since the last call as training time, of so many steps."""
        now = self._clock()
        if self._last_ns is not None:
            self._trained_ns += min(now - self._last_ns, count * MAX_STEP_NS)
        self._last_ns = now

    def spend(self, ns: int) -> None:
        """Subtract the time that a step waited for a compile."""
        self._spent_ns += ns

    def allows(self, cost_ns: int) -> bool:
        """Whether a compile of this duration stays within the share."""
        return self._share > 0 and self._spent_ns + cost_ns <= self._share * self._trained_ns
