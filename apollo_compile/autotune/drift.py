"""Detect drift: steps take longer or shorter than they did after the verdict.

One in `LOOK_EVERY` steps is watched; the others cost nothing. A sample is the time between two looks, with all that a
loop does besides. Times have drifted if the medians of `DRIFT_SAMPLES` samples differ by `DRIFT` from the first such
median twice in a row; also if they are below the time of the winner in an earlier process, where it ran beside other
work. A comparison that confirms the verdict doubles the number of samples before the next one.
"""

from __future__ import annotations

import statistics

LOOK_EVERY = 8
DRIFT_SAMPLES = 8
DRIFT = 0.15


class DriftWatch:
    """Watches the steps of the winner."""

    def __init__(self) -> None:
        self._patience = 1
        self.restart(is_confirmed=False)

    def restart(self, *, is_confirmed: bool, least_ns: float = 0.0) -> None:
        """Start over, twice as patient if the verdict is confirmed; `least_ns`: a step's time in an earlier process."""
        self._patience = 2 * self._patience if is_confirmed else 1
        self._least_ns = LOOK_EVERY * least_ns
        self._before_ns: int | None = None
        self._samples: list[int] = []
        self._usual_ns: float | None = None
        self._num_samples = self._num_off = 0

    def spoil(self) -> None:
        """Take no sample until the next look but one: something else ran between steps."""
        self._before_ns = None

    def has_drifted(self, now_ns: int, *, is_usual: bool = True) -> bool:
        """Look at a step that begins now; return whether to compare again. Unusual steps are no part of a sample."""
        before, self._before_ns = self._before_ns, now_ns if is_usual else None
        if before is None or not is_usual:
            return False
        self._samples.append(now_ns - before)
        self._num_samples += 1
        if len(self._samples) < DRIFT_SAMPLES:
            return False
        median = statistics.median(self._samples)
        self._samples.clear()
        self._usual_ns = self._usual_ns or median
        is_off = abs(median - self._usual_ns) > DRIFT * self._usual_ns or median < (1 - DRIFT) * self._least_ns
        self._num_off = self._num_off + 1 if is_off else 0
        return self._num_off >= 2 and self._num_samples >= 2 * DRIFT_SAMPLES * self._patience
