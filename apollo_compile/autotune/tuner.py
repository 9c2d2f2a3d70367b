"""Decide which candidate runs each step of a training loop, until the fastest is known.

    Tuner.offer(candidates);  Tuner.begin_step() -> the variant of the step that begins;  Tuner.record(ns)

    1. The candidates that can run are compared (`comparison.py`); the winner runs from then on.
    2. A candidate that has to be compiled first is late: it is compiled, and compared with the winner, once its
       compile is within the budget (`budget.py`), or at once if it is urgent, which its owner decides by the verdict.
    3. The winner's steps are watched. If their time changes (`drift.py`), all that can run are compared again.

A comparison takes `MIN_ROUNDS` rounds that count: with fewer, the incumbent stays. Where the tuner times turns itself,
one tuner of the process compares at a time, since a step contains the work of all of them. The owner of a tuner calls
`begin_step` once a step, or once in `WATCH_EVERY` steps while `skip_step` returns True.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from apollo_compile.autotune.budget import CompileBudget
from apollo_compile.autotune.comparison import MIN_ROUNDS, PER_CALL, Comparison, Rules
from apollo_compile.autotune.drift import WATCH_EVERY, DriftWatch
from apollo_compile.ir import Standing, Variant, Verdict

_logger = logging.getLogger(__name__)

ABANDONED_NS = 60_000_000_000
"""A tuner without a step for this long does not keep others from comparing."""


class CandidateError(Exception):
    """A candidate cannot be compiled, or computes something else; the others still compete."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the steps."""

    variant: Variant
    prepare: Callable[[], None] | None = None
    """Compiles it, and raises CandidateError if it cannot be; None if it can run now."""
    cost_ns: int = 0
    """Approximate duration of `prepare`, or of the steps until `is_ready`."""
    is_late: bool = False
    """Whether it waits for the budget."""
    is_urgent: Callable[[Verdict], bool] = lambda verdict: False
    """Whether a late candidate is compiled at once, given the verdict without it."""
    is_ready: Callable[[], bool] = lambda: True
    """Whether its steps may be timed; until then it runs untimed steps, in which it compiles."""


def _ignore(argument: object) -> None:
    return


class Tuner:
    """Selects the variant that runs the steps of one subject; see the top of this file.

    Arguments:
        name: of the subject, for log lines.
        rules: how steps are timed.
        budget: training time that compiles of late candidates may take; several tuners may share one.
        tell: called with every verdict.
        keep: called with the variants that may still run, when these become fewer.
        trim_memory: gives free memory back to the system; called before every turn, so that memory of the candidates
            does not add up, unless that would disturb the timed steps of another tuner.
        clock: host time in nanoseconds.
        now_ns: host time in nanoseconds after the device has finished everything launched so far.
        is_watched: whether to detect drift after the verdict; not where sizes, and so times, change from step to step.
    """

    def __init__(
        self,
        name: str,
        *,
        rules: Rules = PER_CALL,
        budget: CompileBudget,
        tell: Callable[[Verdict], None] = _ignore,
        keep: Callable[[Collection[Variant]], None] = _ignore,
        trim_memory: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.perf_counter_ns,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        is_watched: bool = True,
    ) -> None:
        self.current = Variant.PLAN
        """The variant of the current step."""
        self.verdict: Verdict | None = None
        self.is_timed = False
        """Whether the current step is timed."""
        self.is_skipping = False
        """Whether the current step is one that is not looked at."""
        self._name = name
        self._rules = rules
        self._budget = budget
        self._tell, self._keep, self._trim = tell, keep, trim_memory
        self.clock, self._now_ns = clock, now_ns
        self._candidates: dict[Variant, Candidate] = {}
        """In the order of simplicity; late ones too, from when they are compiled."""
        self._late: dict[Variant, Candidate] = {}
        """Candidates that wait to be compiled."""
        self._lost: dict[Variant, Candidate] = {}
        """Late candidates that lost in an earlier process, and need not be compiled unless times change."""
        self._required: Collection[int] = (0,)
        self._winner = Variant.PLAN
        self._comparison: Comparison | None = None
        self._remaining: Collection[str] = ()
        self._spent_ns = 0
        """How long steps waited for compiles of the candidates."""
        self._turn_begin_ns: int | None = None
        """Begin of the timed steps of the current turn, where the tuner times turns; None if something disturbed it."""
        self.is_watched = is_watched
        self._watch = DriftWatch()
        self._is_confirmed = False
        """Whether the latest comparison had the winner of the one before."""
        self._num_unwatched: float = 0
        """Steps until the next watched one, that one included."""
        self._watched_ns: int | None = None
        self._last_ns = 0
        _tuners.add(self)

    # ---------------------------------------------------------------------------------------------- what is compared

    def offer(self, candidates: Sequence[Candidate], *, incumbent: Variant, required: Collection[int] = (0,)) -> None:
        """Compare these candidates from the next step on, the simplest first; a verdict until then is dropped.

        Arguments:
            candidates: all of them, late ones included.
            incumbent: stays if no comparison counts.
            required: parts of a step that must have run for a round to count.
        """
        self._take(candidates, incumbent, required)
        self.verdict = None
        self._compare(self._compiled())

    def adopt(self, verdict: Verdict, candidates: Sequence[Candidate], *, required: Collection[int] = (0,)) -> None:
        """Run the winner of an earlier process, which is watched; what lost there is compiled only after a drift.

        Raises:
            CandidateError: the winner cannot be compiled.
        """
        self._take(candidates, verdict.winner, required)
        winner = self._late.pop(verdict.winner, None)
        if winner is not None and winner.prepare is not None:
            winner.prepare()
        self.verdict = verdict
        lost = [Variant(each.name) for each in verdict.standings if each.name in self._late]
        self._lost = {variant: self._late.pop(variant) for variant in lost}
        self._settle_on(verdict.winner)

    def leave(self, variant: Variant) -> None:
        """End all comparisons: this variant runs from now on."""
        self._comparison, self.verdict = None, None
        self._late.clear()
        self._candidates = {variant: Candidate(variant=variant)}
        self._settle_on(variant)

    def forget(self, variant: Variant) -> None:
        """Compare this loser no more."""
        for known in (self._candidates, self._late, self._lost):
            known.pop(variant, None)

    def drop(self, variant: Variant) -> None:
        """Compare and run this candidate no more; the others are compared again if it was running."""
        self.forget(variant)
        names = [self._winner] if self._comparison is None else self._comparison.names
        left = [Variant(each) for each in names if each != variant]
        if self._winner == variant:
            self.verdict = None
            left = left or self._compiled()
            self._winner = left[-1]
        self._compare(left)

    # ----------------------------------------------------------------------------------------------------------- steps

    def skip_step(self) -> bool:
        """Return whether the step that begins need not be looked at; then nothing else is called for it."""
        self.is_skipping = self._num_unwatched > 1
        self._num_unwatched = max(0, self._num_unwatched - 1)
        return self.is_skipping

    def begin_step(self) -> Variant:
        """Return the variant of the step that begins.

        Raises:
            Exception: whatever compiling a candidate raises, besides CandidateError.
        """
        self.is_timed = False
        self._last_ns = self.clock()
        if self._comparison is None and not self._watch_step():
            return self.current
        while self._comparison is not None:
            comparison = self._comparison
            unready = self._unready()
            if unready is not None:
                self.current = unready
                return self.current
            if self._rules.is_timed_by_turn and not self._may_compare():
                self.current = self._winner
                return self.current
            self._end_turn_of(comparison)
            chosen = comparison.begin_step()
            if chosen is not None:
                return self._run_step_of(comparison, Variant(chosen))
            self._end_comparison(comparison)
        return self.current

    def record(self, ns: int, part: int = 0) -> None:
        """Record the duration of one part of the current step, unless the tuner times turns."""
        if self._rules.is_timed_by_turn:
            return
        if self._comparison is None:
            self._watch.record(ns, part)
        elif self.is_timed:
            self._comparison.record(ns, part)

    def spoil(self) -> None:
        """Discard the times of the current step: something else ran, or ran beside it."""
        self._watch.spoil()
        self._turn_begin_ns = None

    def spend(self, ns: int) -> None:
        """Note that the current step waited so long for a compile."""
        self._spent_ns += ns
        self._budget.spend(ns)

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being compared: there is a winner, and it is compiled."""
        return self._comparison is None and bool(self._candidates) and self._unready() is None and not self._urgent()

    @property
    def winner(self) -> Variant:
        """The variant that runs between comparisons."""
        return self._winner

    @property
    def is_comparing(self) -> bool:
        """Whether a comparison is running."""
        return self._comparison is not None

    @property
    def is_more_to_come(self) -> bool:
        """Whether candidates are still to be compiled, once that is a small share of the training time."""
        return bool(self._late)

    @property
    def round(self) -> str:
        """The current round and the most that there may be, as in `3/12`; empty if nothing is being compared."""
        return "" if self._comparison is None else self._comparison.round

    @property
    def progress(self) -> str:
        """Times until now, as in `plan 41.2 ms, ...`; after the verdict, as in `plan, 1.12x segments in turn (...)`."""
        if self._comparison is not None:
            return self._comparison.progress
        return self.current if self.verdict is None else self.verdict.summary

    @property
    def steps_left(self) -> int:
        """Approximate number of steps of the comparison that are left; 0 if none is running."""
        return 0 if self._comparison is None else self._comparison.steps_left

    @property
    def remaining(self) -> Collection[Variant]:
        """Variants that may still run, those that are late included."""
        running = self._comparison.remaining if self._comparison is not None else (self._winner,)
        return {*map(Variant, running), *self._late}

    # -------------------------------------------------------------------------------------------------------- its parts

    def _take(self, candidates: Sequence[Candidate], incumbent: Variant, required: Collection[int]) -> None:
        self._candidates = {each.variant: each for each in candidates}
        self._late = {each.variant: each for each in candidates if each.is_late}
        self._lost = {}
        self._winner, self._required = incumbent, (0,) if self._rules.is_timed_by_turn else required
        self._comparison = None

    def _compiled(self) -> list[Variant]:
        """Return the candidates that can run now, or compile in their own steps."""
        return [each for each in self._candidates if each not in self._late and each not in self._lost]

    def _compare(self, variants: Sequence[Variant]) -> None:
        """Compare these variants from the next step on."""
        ordered = [each for each in self._candidates if each in variants]
        if len(ordered) == 1:
            self._comparison = None
            if self.verdict is None:
                self.verdict = Verdict(standings=(_unmeasured(ordered[0]),), num_steps=0)
            self._winner = ordered[0]
            self._conclude()
            return
        self._comparison = Comparison(ordered, self._required, self._rules)
        self._num_unwatched = 0
        self._note_remaining()

    def _run_step_of(self, comparison: Comparison, chosen: Variant) -> Variant:
        if comparison.is_in_first_step:
            if not any(self._is_disturbed_by(other) for other in _tuners):
                self._trim()
            self._note_remaining()
        if comparison.num_timed == 1:
            self._turn_begin_ns = self._now_ns() if self._rules.is_timed_by_turn else None
        self.is_timed = comparison.num_timed > 0
        self.current = chosen
        return chosen

    def _end_turn_of(self, comparison: Comparison) -> None:
        """Record the turn that has just ended, if the tuner times turns."""
        begin = self._turn_begin_ns
        if self._rules.is_timed_by_turn and comparison.is_turn_complete and begin is not None:
            comparison.record((self._now_ns() - begin) // comparison.num_timed)
            self._turn_begin_ns = None

    def _end_comparison(self, comparison: Comparison) -> None:
        """Reach a verdict, and compile the next late candidate if it is urgent."""
        is_known = comparison.num_rounds >= MIN_ROUNDS
        incumbent = self._winner if self._winner in comparison.names else Variant(comparison.names[-1])
        winner = Variant(comparison.winner()) if is_known else incumbent
        standings = [comparison.standing(name, winner) for name in comparison.names]
        before = self.verdict
        self.verdict = Verdict(
            standings=tuple(
                sorted([*standings, *_rescaled(before, standings)], key=lambda each: (each.name != winner, each.ratio))
            ),
            num_steps=comparison.num_steps + (0 if before is None else before.num_steps),
            prepare_ns=self._spent_ns,
        )
        self._is_confirmed = before is not None and before.winner == winner
        self._comparison, self._winner = None, winner
        self._conclude()

    def _conclude(self) -> None:
        """Compare the next late candidate, if it is urgent; else the verdict is final."""
        assert self.verdict is not None
        urgent = self._urgent()
        if urgent is not None:
            self._add_late(urgent)
        if self._comparison is None:
            self._settle_on(self._winner, is_confirmed=self._is_confirmed)
            self._tell_of(self.verdict)

    def _urgent(self) -> Candidate | None:
        """Return a late candidate that is to be compiled at once."""
        verdict = self.verdict
        if verdict is None or verdict.is_remembered:
            return None
        return next((each for each in self._late.values() if each.is_urgent(verdict)), None)

    def _settle_on(self, variant: Variant, *, is_confirmed: bool = False) -> None:
        self.current = self._winner = variant
        self._watch.restart(is_confirmed=is_confirmed)
        self._num_unwatched, self._watched_ns = 0, None
        if not (self.is_watched or self._late):
            self._num_unwatched = math.inf
        self._remaining = ()
        self._note_remaining()

    def _tell_of(self, verdict: Verdict) -> None:
        if verdict.is_measured:
            _logger.info("%s: chosen by measuring: %s", self._name, verdict)
        self._tell(verdict)

    def _note_remaining(self) -> None:
        remaining = self.remaining
        if remaining != self._remaining:
            self._remaining = remaining
            self._keep(remaining)

    def _unready(self) -> Variant | None:
        """Return a candidate that still compiles in its own steps; None if there is none."""
        compared = [self._winner] if self._comparison is None else self._comparison.names
        known = (self._candidates.get(Variant(each)) for each in compared)
        return next((each.variant for each in known if each is not None and not each.is_ready()), None)

    # ---------------------------------------------------------------------------------------------- after the verdict

    def _watch_step(self) -> bool:
        """Watch the winner's steps; return whether a comparison begins."""
        if not self._candidates:
            return False
        self._budget.note_steps(WATCH_EVERY)
        if self._unready() is not None:
            return False
        if self._urgent() is not None:  # its compile was interrupted
            self._conclude()
            return self._comparison is not None
        due = next(iter(self._late.values()), None)
        if due is not None and self._budget.allows(due.cost_ns):
            self._add_late(due)
            return self._comparison is not None
        return self.is_watched and self._has_drifted()

    def _has_drifted(self) -> bool:
        if self._rules.is_timed_by_turn:  # without waiting for the device
            now, before = self._last_ns, self._watched_ns
            self._watched_ns = now
            self._num_unwatched = WATCH_EVERY
            self._watch.begin_step()
            if before is None:
                return False
            self._watch.record((now - before) // WATCH_EVERY)
        elif not self._watch.is_in_step:  # this step gives the sample
            self._watch.begin_step()
            self._num_unwatched = 0
            return False
        else:
            self._num_unwatched = WATCH_EVERY
        if not self._watch.has_drifted(self._required):
            self.is_skipping = self._num_unwatched > 0  # the rest of this step
            return False
        self._late, self._lost = {**self._lost, **self._late}, {}
        others = self._compiled()
        if len(others) > 1:
            self._compare(others)
        return self._comparison is not None

    def _add_late(self, candidate: Candidate) -> None:
        """Compile a late candidate, and compare it with the winner."""
        del self._late[candidate.variant]
        begin = self.clock()
        try:
            if candidate.prepare is not None:
                self._trim()
                candidate.prepare()
        except CandidateError as error:
            self._candidates.pop(candidate.variant)
            _logger.warning("%s: %s is not compared: %s", self._name, candidate.variant, error)
            return
        except BaseException:  # an interrupt; it is compiled in the next step
            self._late = {candidate.variant: candidate, **self._late}
            raise
        finally:
            self.spend(self.clock() - begin)
        if self._comparison is None:
            self._compare([self._winner, candidate.variant])

    def _is_disturbed_by(self, other: Tuner) -> bool:
        """Whether another tuner compares now, and its steps are still taken."""
        return other is not self and other.is_comparing and other._last_ns + ABANDONED_NS > self._last_ns

    def _may_compare(self) -> bool:
        """Whether no other tuner that times turns is comparing; then this one does."""
        global _comparing
        other = None if _comparing is None else _comparing()
        if other is not None and self._is_disturbed_by(other):
            return False
        _comparing = weakref.ref(self)
        return True


def _unmeasured(variant: Variant) -> Standing:
    return Standing(name=variant, step_ns=0.0, ratio=1.0, num_rounds=0)


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


_tuners: weakref.WeakSet[Tuner] = weakref.WeakSet()
"""All tuners of this process."""

_comparing: weakref.ref[Tuner] | None = None
"""The tuner that times turns now."""
