"""The decision of a tuner: its candidates, the comparison that is running, and the verdict."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from apollo_compile.autotune.candidates import Candidate, Candidates
from apollo_compile.autotune.comparison import Comparison, Rules, typical_steps
from apollo_compile.ir import MIN_ROUNDS, Standing, Variant, Verdict


class Decision:
    """Candidates, the comparison that is running, and the verdict."""

    def __init__(self, rules: Rules) -> None:
        self.current = Variant.PLAN
        """The variant of the current step."""
        self.verdict: Verdict | None = None
        self._rules = rules
        self._candidates = Candidates()
        self._required: Collection[int] = (0,)
        """Parts of a step that must have run for a round to count."""
        self.winner = Variant.PLAN
        """The variant that runs between comparisons."""
        self._comparison: Comparison | None = None
        self._gaps: deque[int] = deque(maxlen=9)
        """Times between the beginnings of the latest compared steps."""
        self._spent_ns = 0
        """How long steps waited for compiles of the candidates."""
        self._is_after_drift = False
        """Whether a drift led to the comparison that is running."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being compared: there is a winner, and it is ready."""
        is_waiting = self._unready() is not None or self._candidates.urgent(self.verdict) is not None
        return self._comparison is None and bool(self._candidates) and not is_waiting

    @property
    def is_comparing(self) -> bool:
        """Whether a comparison is running."""
        return self._comparison is not None

    @property
    def is_more_to_come(self) -> bool:
        """Whether candidates are still to be compiled, once that is a small share of the training time."""
        return bool(self._candidates.late)

    @property
    def steps_left(self) -> int:
        """About how many steps comparisons still take; 0 if nothing is being compared."""
        if self._comparison is None:
            return 0
        more = 0 if self.verdict is not None else self._candidates.num_comparisons
        return self._comparison.steps_left + more * typical_steps(2, self._rules)

    @property
    def left_ns(self) -> int:
        """About how long comparisons still take, with all that is between steps; 0 if that is unknown."""
        return round(self.steps_left * statistics.median(self._gaps)) if len(self._gaps) > 2 else 0

    def expected_steps(self, candidates: Sequence[Candidate]) -> int:
        """Return about how many steps it will take to decide between these candidates."""
        known = Candidates(candidates)
        return sum(typical_steps(each, self._rules) for each in (len(known.compiled()), *[2] * known.num_comparisons))

    @property
    def progress(self) -> str:
        """Times until now, as in `plan 41.2 ms, segments in turn 44.0 ms`; empty if nothing is being compared."""
        return "" if self._comparison is None else self._comparison.progress

    @property
    def remaining(self) -> Collection[Variant]:
        """Variants that may still run, those that are late included."""
        running = self._comparison.remaining if self._comparison is not None else (self.winner,)
        return {*map(Variant, running), *self._candidates.late}

    def forget(self, variant: Variant) -> None:
        """Compare this loser no more."""
        self._candidates.forget(variant)

    def _take(self, candidates: Sequence[Candidate], incumbent: Variant, required: Collection[int]) -> None:
        self._candidates = Candidates(candidates)
        self.winner, self._required = incumbent, (0,) if self._rules.is_timed_by_turn else required
        self._comparison = None

    def _unready(self) -> Variant | None:
        """Return a candidate whose steps may not be timed yet; None if there is none."""
        names = [self.winner] if self._comparison is None else self._comparison.names
        return self._candidates.unready(map(Variant, names))

    def _end_comparison(self, comparison: Comparison) -> bool:
        """Reach a verdict; return whether it confirms, after a drift, the verdict before."""
        is_known = comparison.num_rounds >= MIN_ROUNDS
        incumbent = self.winner if self.winner in comparison.names else Variant(comparison.names[-1])
        winner = Variant(comparison.winner()) if is_known else incumbent
        before = self.verdict
        standings = [comparison.standing(name, winner) for name in comparison.names]
        every = [*standings, *_rescaled(before, standings)]
        self.verdict = Verdict(
            standings=tuple(sorted(every, key=lambda each: (each.name != winner, each.ratio))),
            num_steps=comparison.num_steps + (0 if before is None else before.num_steps),
            prepare_ns=self._spent_ns,
        )
        is_confirmed = self._is_after_drift and before is not None and before.winner == winner
        self._is_after_drift = False
        self._comparison, self.winner = None, winner
        return is_confirmed


def _rescaled(before: Verdict | None, standings: Sequence[Standing]) -> list[Standing]:
    """Return the earlier standings of candidates that were not compared now, relative to the present winner."""
    if before is None:
        return []
    ratios = {each.name: each.ratio for each in standings}
    scale = ratios.get(before.winner, 1.0)
    return [
        replace(each, ratio=each.ratio * scale, interval=(each.interval[0] * scale, each.interval[1] * scale))
        for each in before.standings
        if each.name not in ratios and each.num_rounds
    ]
