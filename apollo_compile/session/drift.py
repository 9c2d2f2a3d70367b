"""Whether the steps of a model have come to take longer or shorter than they did.

One in `WATCH_EVERY` steps stays watched, and the others cost nothing. Which one is decided when a step begins and holds
for all its graphs: a sample is a whole step, the sum over the graphs of their mean call, so that it does not depend on
how many forwards come before their backwards, or how often the model is evaluated between two steps. A step in which
not all graphs ran that have run before, or in which calls of several threads overlapped, is no sample. Times have
drifted if the medians of `DRIFT_STEPS` samples are off by `DRIFT` from the first such median twice in a row. Each time
that changes nothing, the next drift is at least twice as far away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

WATCH_EVERY = 8
DRIFT_STEPS = 8
DRIFT = 0.15


class DriftWatch:
    """Notices that the winner's steps take longer or shorter than they did."""

    def __init__(self) -> None:
        self.total_ns = 0
        """How long the loop has run with a verdict, about."""
        self._patience = 1
        self.restart(is_confirmed=False)

    def restart(self, *, is_confirmed: bool) -> None:
        """Begin anew after a verdict; be more patient if it was the one before."""
        self._patience = 2 * self._patience if is_confirmed else 1
        self._samples: list[float] = []
        self._calls: dict[int, list[int]] | None = None
        """Of the step that is watched, per graph: how many, and how long they took together."""
        self._is_spoilt = False
        self._steps = 0
        self._usual: float | None = None
        self._num_off = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a watched step has begun and was not ended."""
        return self._calls is not None

    def begin_step(self, *, is_spoilt: bool) -> None:
        """Watch the step that begins now; no sample is taken from one that is spoilt."""
        self._calls, self._is_spoilt = {}, is_spoilt

    def record(self, graph: object, ns: int) -> None:
        """Add a call to the step that is going on."""
        if self._calls is not None:
            counted = self._calls.setdefault(id(graph), [0, 0])
            counted[0] += 1
            counted[1] += ns

    def spoil(self) -> None:
        """Take no sample from the step that is going on."""
        self._is_spoilt = True

    def has_drifted(self, graphs: Iterable[object]) -> bool:
        """End a step, in which all of `graphs` should have run; return whether the comparison should be held again."""
        calls, self._calls = self._calls or {}, None
        self.total_ns += WATCH_EVERY * sum(ns for _, ns in calls.values())
        if self._is_spoilt or calls.keys() != {id(graph) for graph in graphs}:
            return False
        self._samples.append(sum(ns / count for count, ns in calls.values()))
        self._steps += 1
        if len(self._samples) < DRIFT_STEPS:
            return False
        median = statistics.median(self._samples)
        self._samples.clear()
        if self._usual is None:
            self._usual = median
            return False
        self._num_off = self._num_off + 1 if abs(median / self._usual - 1) > DRIFT else 0
        return self._num_off >= 2 and self._steps >= 2 * DRIFT_STEPS * self._patience
