"""Detect drift: steps take longer or shorter than they did after the verdict.

One in `WATCH_EVERY` steps is watched; the others cost nothing. A sample is a whole step: the sum over its parts (the
graphs of a model) of their mean call, so it depends neither on how many forwards precede their backwards nor on how
often the model is evaluated between two steps. A step in which some part did not run, or in which calls of several
threads overlapped, gives no sample. Times have drifted if the medians of `DRIFT_STEPS` samples differ by `DRIFT` from
the first such median twice in a row. Each drift that leads to the same winner doubles the number of steps before the
next one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection

WATCH_EVERY = 8
DRIFT_STEPS = 8
DRIFT = 0.15


class StepWatch:
    """Decides which steps are watched, and notices drift in them.

    Arguments:
        clock: host time in nanoseconds. If given, a sample is the mean time between the beginnings of watched steps;
            else durations are recorded.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self.is_skipping = False
        """Whether the current step is not watched."""
        self._clock = clock
        self._drift = DriftWatch()
        self._num_unwatched: float = 0
        """Steps until the next watched one, that one included."""
        self._watched_ns: int | None = None

    def restart(self, *, is_confirmed: bool, is_off: bool = False) -> None:
        """Start over after a verdict, or watch nothing any more."""
        self._drift.restart(is_confirmed=is_confirmed)
        self._num_unwatched, self._watched_ns = math.inf if is_off else 0, None

    def watch_all(self) -> None:
        """Skip no step."""
        self._num_unwatched = 0

    def skip_step(self) -> bool:
        """Return whether the step that begins is not watched."""
        self.is_skipping = self._num_unwatched > 1
        self._num_unwatched = max(0, self._num_unwatched - 1)
        return self.is_skipping

    def record(self, ns: int, part: int) -> None:
        """Record the duration of a part of the current step."""
        self._drift.record(ns, part)

    def spoil(self) -> None:
        """Take no sample from the current step."""
        self._drift.spoil()

    def has_drifted(self, parts: Collection[int]) -> bool:
        """Look at a step that begins; return whether times have drifted."""
        if self._clock is not None:
            now, before = self._clock(), self._watched_ns
            self._watched_ns, self._num_unwatched = now, WATCH_EVERY
            self._drift.begin_step()
            if before is None:
                return False
            self._drift.record((now - before) // WATCH_EVERY)
        elif not self._drift.is_in_step:  # this step gives the sample
            self._drift.begin_step()
            return False
        else:
            self._num_unwatched = WATCH_EVERY
        has_drifted = self._drift.has_drifted(parts)
        self.is_skipping = not has_drifted  # the rest of this step
        return has_drifted


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
