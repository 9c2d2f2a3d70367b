"""One graph of a process is compared at a time, since every step contains all of them: `Exclusive`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

LATE_NS = 60_000_000_000
"""What was not called for so long does not keep others from being compared."""


class Exclusive:
    """The right to compare, which one contest of the process has at a time."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._last_ns = 0

    def note_step(self) -> None:
        """Note that the graph is still called."""
        self._last_ns = self._clock()

    def may_take(self) -> bool:
        """Whether no other has it that is still called."""
        other = None if _holder is None else _holder()
        return other is None or other is self or other._last_ns + LATE_NS <= self._clock()

    def take(self) -> None:
        """Have it from now on."""
        global _holder
        self.note_step()
        _holder = weakref.ref(self)

    def leave(self) -> None:
        """Let others have it."""
        global _holder
        if _holder is not None and _holder() is self:
            _holder = None


_holder: weakref.ref[Exclusive] | None = None
