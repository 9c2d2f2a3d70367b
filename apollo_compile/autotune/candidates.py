"""The candidates of a tuner: those that can run, `late` ones that wait for the compile budget, and `lost` ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from apollo_compile.ir import Variant, Verdict

MAX_STEP_NS = 60_000_000_000
"""Longest gap between steps that counts as training time."""


class CandidateError(Exception):
    """A candidate cannot be compiled, or computes other results; the others still compete."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the steps."""

    variant: Variant
    prepare: Callable[[], None] | None = None
    """Compiles it, and raises CandidateError if it cannot be; None if it can run now."""
    cost_ns: int = 0
    """Approximate duration of `prepare`, or of the steps until `is_ready`."""
    is_late: bool = False
    """Compile it only once the budget allows its cost."""
    is_urgent: Callable[[Verdict], bool] | None = None
    """Whether a late candidate is compiled at once, given the verdict without it; None if it never is."""
    is_ready: Callable[[], bool] = lambda: True
    """Whether its steps may be timed; until then it runs untimed steps, in which it compiles or is tuned."""


class Candidates:
    """The candidates of one decision, the simplest first."""

    def __init__(self, candidates: Sequence[Candidate] = ()) -> None:
        self._all = {each.variant: each for each in candidates}
        self._late = {each.variant: each for each in candidates if each.is_late}
        self._lost: dict[Variant, Candidate] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def late(self) -> Sequence[Variant]:
        """Variants that wait to be compiled, in this order."""
        return tuple(self._late)

    def compiled(self) -> list[Variant]:
        """Return the variants that can run now, or compile in their own steps."""
        return [each for each in self._all if each not in self._late and each not in self._lost]

    def in_order(self, variants: Iterable[Variant]) -> list[Variant]:
        """Return known variants, the simplest first."""
        wanted = set(variants)
        return [each for each in self._all if each in wanted]

    def forget(self, variant: Variant) -> None:
        """Compare a variant no more."""
        for known in (self._all, self._late, self._lost):
            known.pop(variant, None)

    def prepare(self, variant: Variant) -> None:
        """Compile a late candidate, which is not late from then on.

        Raises:
            CandidateError: it cannot be compiled; it is forgotten.
            BaseException: an interrupt; it is still late.
        """
        candidate = self._late.pop(variant)
        try:
            if candidate.prepare is not None:
                candidate.prepare()
        except CandidateError:
            self.forget(variant)
            raise
        except BaseException:
            self._late = {variant: candidate, **self._late}
            raise

    def leave_out_losers(self, verdict: Verdict) -> None:
        """Compile no late candidate that lost in an earlier process, until `restore_losers`."""
        lost = [Variant(each.name) for each in verdict.standings if each.name in self._late]
        self._lost = {variant: self._late.pop(variant) for variant in lost}

    def restore_losers(self) -> None:
        """Let such candidates be compiled once that is due."""
        self._late, self._lost = {**self._lost, **self._late}, {}

    def unready(self, variants: Iterable[Variant]) -> Variant | None:
        """Return one of these whose steps may not be timed yet; None if there is none."""
        known = (self._all[each] for each in variants if each in self._all)
        return next((each.variant for each in known if not each.is_ready()), None)

    def urgent(self, verdict: Verdict | None) -> Variant | None:
        """Return a late candidate that is to be compiled at once, given this verdict of this process."""
        if verdict is None or verdict.is_remembered:
            return None
        return next((late for late, each in self._late.items() if each.is_urgent and each.is_urgent(verdict)), None)

    @property
    def num_comparisons(self) -> int:
        """About how many comparisons of a late candidate with the winner come at once, after that of the others."""
        return sum(each.is_urgent is not None for each in self._late.values())

    def due(self, allows: Callable[[int], bool]) -> Variant | None:
        """Return the first late candidate if its cost is allowed."""
        first = next(iter(self._late.values()), None)
        return first.variant if first is not None and allows(first.cost_ns) else None


class CompileBudget:
    """Share of the training time for compiles that serve a comparison only."""

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
        """Add the time since the last call, in which so many steps began, as training time."""
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
