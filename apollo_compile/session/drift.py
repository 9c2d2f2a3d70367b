"""Detect drift: the steps of a model take longer or shorter than they did after the verdict.

One in `WATCH_EVERY` steps is watched; the others cost nothing. A sample is a whole step: the sum over the graphs of
their mean call, so it depends neither on how many forwards come before their backwards nor on how often the model is
evaluated between two steps. A step in which some graph did not run, or in which calls of several threads overlapped, is
no sample. Times have drifted if the medians of `DRIFT_STEPS` samples differ by `DRIFT` from the first such median twice
in a row. Each time a drift leads to the same verdict, the number of steps before the next drift at least doubles.
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
        """Approximate time that the loop has run since the verdict."""
        self._patience = 1
        self.restart(is_confirmed=False)

    def restart(self, *, is_confirmed: bool) -> None:
        """Start over after a verdict; double the patience if it confirmed the verdict before."""
        self._patience = 2 * self._patience if is_confirmed else 1
        self._samples: list[float] = []
        self._calls: dict[int, list[int]] | None = None
        """Number and total nanoseconds of the calls in the watched step, by graph."""
        self._is_spoilt = False
        self._steps = 0
        self._usual: float | None = None
        self._num_off = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a watched step is in progress."""
        return self._calls is not None

    def begin_step(self, *, is_spoilt: bool) -> None:
        """Watch the step that begins now; a spoilt step gives no sample."""
        self._calls, self._is_spoilt = {}, is_spoilt

    def record(self, graph: object, ns: int) -> None:
        """Add a call to the current step."""
        if self._calls is not None:
            counted = self._calls.setdefault(id(graph), [0, 0])
            counted[0] += 1
            counted[1] += ns

    def spoil(self) -> None:
        """Take no sample from the current step."""
        self._is_spoilt = True

    def has_drifted(self, graphs: Iterable[object]) -> bool:
        """End a step, in which all of `graphs` should have run; return whether to compare again."""
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
