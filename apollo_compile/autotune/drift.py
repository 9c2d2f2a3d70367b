"""Detect drift: steps take longer or shorter than they did after the verdict.

One in `WATCH_EVERY` steps is watched; the others cost nothing. A sample is a whole step: the sum over its parts (the
graphs of a model) of their mean call, so it depends neither on how many forwards precede their backwards nor on how
often the model is evaluated between two steps. A step in which some part did not run, or in which calls of several
threads overlapped, gives no sample. Times have drifted if the medians of `DRIFT_STEPS` samples differ by `DRIFT` from
the first such median twice in a row. Each drift that leads to the same winner doubles the number of steps before the
next one.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

WATCH_EVERY = 8
DRIFT_STEPS = 8
DRIFT = 0.15


class DriftWatch:
    """Watches the steps of the winner."""

    def __init__(self) -> None:
        self._patience = 1
        self.restart(is_confirmed=False)

    def restart(self, *, is_confirmed: bool) -> None:
        """Start over after a verdict; double the patience if it confirmed the verdict before."""
        self._patience = 2 * self._patience if is_confirmed else 1
        self._samples: list[float] = []
        self._calls: dict[int, list[int]] | None = None
        """Durations of the calls in the watched step, by part; None while no step is watched."""
        self._is_spoilt = False
        self._steps = 0
        self._usual: float | None = None
        self._num_off = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a watched step is in progress."""
        return self._calls is not None

    def begin_step(self) -> None:
        """Watch the step that begins now."""
        self._calls, self._is_spoilt = {}, False

    def record(self, ns: int, part: int = 0) -> None:
        """Add a call to the current step, if it is watched."""
        if self._calls is not None:
            self._calls.setdefault(part, []).append(ns)

    def spoil(self) -> None:
        """Take no sample from the current step."""
        self._is_spoilt = True

    def has_drifted(self, parts: Collection[int] = (0,)) -> bool:
        """End a step, in which all of `parts` should have run; return whether to compare again."""
        calls, self._calls = self._calls or {}, None
        if self._is_spoilt or calls.keys() != set(parts):
            return False
        self._samples.append(sum(sum(times) / len(times) for times in calls.values()))
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
