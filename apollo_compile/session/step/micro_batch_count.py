"""Into how many micro-batches a step is split, where the user leaves that open.

    MicroBatchCount(settled, predict, ...);    count: of the step that begins now;    step_ended(ns)

One micro-batch, the whole batch, runs first, until it is known what runs it fastest. Numbers whose program is predicted
to be faster by `WORTH` are compiled and tuned next, one after the other, and then all take turns, by the rules of
`comparison.py`. One micro-batch always competes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence

from apollo_compile.ir import Variant
from apollo_compile.session.comparison import MIN_ROUNDS, Comparison
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

CANDIDATES = (2, 4)
"""Numbers of micro-batches besides 1."""

MAX_MISSES = 20
"""Batches that could not be split into a number of micro-batches, after which it is given up."""

WORTH = 0.02
"""Share of the predicted time that a number has to save."""


class MicroBatchCount:
    """Chooses the number of micro-batches of a step.

    Arguments:
        settled: whether it is known what runs steps of so many micro-batches.
        predict: returns the predicted nanoseconds of the program of such a step; None where there is none.
        is_compared: whether measured times decide; if not, predictions do.
    """

    def __init__(
        self, settled: Callable[[int], bool], predict: Callable[[int], int | None], *, is_compared: bool
    ) -> None:
        self._settled = settled
        self._predict = predict
        self._is_compared = is_compared
        self.verdict = "1 micro-batch; other numbers are not known yet"
        self.is_known = False
        """Whether the verdict is final."""
        self.is_timing = False
        """Whether times of steps are compared now."""
        self._procedure = self._choose()
        self.count = next(self._procedure)
        """Number of micro-batches of the step that begins now."""

    def step_ended(self, ns: int | None) -> None:
        """Note how long a step of `count` micro-batches took; None if the batch could not be split so."""
        self.count = self._procedure.send(ns)

    def _choose(self) -> Generator[int, int | None, None]:
        yield from self._settle(1)
        predicted = {count: ns for count in (1, *CANDIDATES) if (ns := self._predict(count)) is not None}
        alive = [1]
        if 1 in predicted:
            alive += [count for count, ns in predicted.items() if ns < (1 - WORTH) * predicted[1]]
        times = ", ".join(f"{count}: {format_ns(ns)}" for count, ns in predicted.items()) or "nothing"
        _logger.info("micro-batches: predicted for the program of a step, by their number: %s", times)
        if not self._is_compared:
            winner = min(alive, key=lambda count: predicted.get(count, 0))
            self.verdict = f"{winner}, by prediction: {times}"
        elif len(alive) == 1:
            winner = 1
            self.verdict = f"1: no other number is predicted to be faster: {times}"
        else:
            for count in list(alive[1:]):
                if not (yield from self._settle(count)):
                    alive.remove(count)
            winner = yield from self._compare(alive)
        self.is_known = True
        _logger.info("micro-batches: %s", self.verdict)
        while True:
            yield winner

    def _settle(self, count: int) -> Generator[int, int | None, bool]:
        """Take steps until it is known what runs them; return False where batches cannot be split so."""
        num_misses = 0
        while not self._settled(count):
            num_misses += (yield count) is None
            if num_misses > MAX_MISSES:
                return False
        return True

    def _compare(self, counts: Sequence[int]) -> Generator[int, int | None, int]:
        self.is_timing = True
        comparison = Comparison({str(count): count * (Variant.PLAN,) for count in counts})
        while (selection := comparison.begin_step()) is not None:
            ns = yield len(selection)
            if ns is not None:
                comparison.record(0, ns)
        self.is_timing = False
        winner = comparison.winner() if comparison.num_rounds >= MIN_ROUNDS else "1"
        standings = [comparison.standing(str(count), winner) for count in counts]
        times = (f"{each.name}: {format_ns(round(each.step_ns))} ({each.ratio:.2f}x)" for each in standings)
        self.verdict = f"{winner}, by measuring: {', '.join(times)}"
        return int(winner)
