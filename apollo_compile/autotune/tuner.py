"""Decide which candidate runs each step of a training loop, until the fastest is known.

    1. The candidates that can run are compared (`comparison.py`); the winner runs from then on.
    2. A candidate that has to be compiled first is late: it is compiled, and compared with the winner, once its
       compile is within the `CompileBudget`, or at once if it is urgent, which its owner decides by the verdict.
    3. The winner's steps are watched. If their time changes (`drift.py`), all that can run are compared again.

A comparison takes `MIN_ROUNDS` rounds that count: with fewer, the incumbent stays. Where the tuner times turns itself,
one tuner of the process compares at a time, since a step contains the work of all of them. The owner of a tuner calls
`begin_step` once a step, unless `skip_step` returns True.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from apollo_compile.autotune.candidates import Candidate, CandidateError, CompileBudget
from apollo_compile.autotune.comparison import PER_CALL, Comparison, Rules
from apollo_compile.autotune.decision import Decision
from apollo_compile.autotune.drift import LOOK_EVERY, DriftWatch
from apollo_compile.ir import Standing, Variant, Verdict

_logger = logging.getLogger(__name__)

ABANDONED_NS = 60_000_000_000
"""A tuner without a step for this long does not keep others from comparing."""


class Tuner(Decision):
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
        tell: Callable[[Verdict], None] = lambda verdict: None,
        keep: Callable[[Collection[Variant]], None] = lambda variants: None,
        trim_memory: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.perf_counter_ns,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        is_watched: bool = True,
    ) -> None:
        super().__init__(rules)
        self.is_timed = False
        """Whether the current step is timed."""
        self._name = name
        self._budget = budget
        self._tell, self._keep, self._trim = tell, keep, trim_memory
        self.clock = clock
        self._now_ns = now_ns
        self._turn_began_ns: int | None = None
        """When the timed steps of this turn began, if they are timed from border to border."""
        self._remaining: Collection[str] = ()
        self.is_watched = is_watched
        self._drift = DriftWatch()
        self._num_to_skip: float = 0
        self.is_skipping = False
        """Whether the rest of the current step is not watched."""
        self.last_ns = 0
        """Host time at the beginning of the latest step."""
        _tuners.append(weakref.ref(self, _tuners.remove))

    # -------------------------------------------------------------------------------------------------- candidates

    def offer(self, candidates: Sequence[Candidate], *, incumbent: Variant, required: Collection[int] = (0,)) -> None:
        """Compare these candidates from the next step on, the simplest first; a verdict until then is dropped.

        Arguments:
            candidates: all of them, late ones included.
            incumbent: stays if no comparison counts.
            required: parts of a step that must have run for a round to count.
        """
        self._take(candidates, incumbent, required)
        self.verdict = None
        self._budget.begin()
        self._compare(self._candidates.compiled())

    def adopt(self, verdict: Verdict, candidates: Sequence[Candidate], *, required: Collection[int] = (0,)) -> None:
        """Run the winner of an earlier process, and watch it; late losers are compiled only after a drift.

        Candidates that were close to the winner are compared with it again, unless they are late: which of them is the
        fastest differs between processes. If the winner cannot be compiled, the others are compared.
        """
        self._take(candidates, verdict.winner, required)
        self._budget.begin()
        if verdict.winner in self._candidates.late:
            try:
                self._candidates.prepare(verdict.winner)
            except CandidateError as error:
                line = "%s: %s, the fastest of an earlier run, cannot be compiled, so the others are compared: %s"
                _logger.warning(line, self._name, verdict.winner, error)
                left = self._candidates.compiled()
                self.winner = left[-1]
                self._compare(left)
                return
        self._candidates.leave_out_losers(verdict)
        self.verdict = verdict
        again = [each for each in self._candidates.compiled() if each in verdict.close]
        if len(again) > 1:
            self._compare(again)
        else:
            self._settle_on(verdict.winner)

    def leave(self, variant: Variant) -> None:
        """End all comparisons: this variant runs from now on."""
        self.verdict = None
        self._take([Candidate(variant=variant)], variant, (0,))
        self._settle_on(variant)

    def drop(self, variant: Variant) -> None:
        """Compare and run this candidate no more; the others are compared again if it was running."""
        self.forget(variant)
        names = [self.winner] if self._comparison is None else self._comparison.names
        left = [Variant(each) for each in names if each != variant]
        if self.winner == variant:
            self.verdict, left = None, self._candidates.compiled()
            self.winner = left[-1]
        self._compare(left)

    # ----------------------------------------------------------------------------------------------------------- steps

    def skip_step(self) -> bool:
        """Return whether the step that begins is not watched; then nothing else is called for it."""
        self.is_skipping = self._num_to_skip > 0
        self._num_to_skip = max(0, self._num_to_skip - 1)
        return self.is_skipping

    def begin_step(self) -> Variant:
        """Return the variant of the step that begins.

        Raises:
            Exception: whatever compiling a candidate raises, besides CandidateError.
        """
        self.is_timed = False
        now = self.clock()
        if self._comparison is not None:
            self._gaps.append(now - self.last_ns)
        self.last_ns = now
        if self._comparison is None and not self._watch_step(now):
            self.is_skipping = True
            return self.current
        while self._comparison is not None:
            comparison = self._comparison
            unready = self._unready()
            if unready is not None:
                self.current = unready
                return self.current
            if self._rules.is_timed_by_turn and not _may_compare(self):
                self.spoil()
                self.current = self.winner
                return self.current
            if self._turn_began_ns is not None and comparison.is_turn_complete:
                comparison.record((self._now_ns() - self._turn_began_ns) // comparison.num_timed)
                self._turn_began_ns = None
            chosen = comparison.begin_step()
            if chosen is not None:
                return self._run_step_of(comparison, Variant(chosen))
            self._conclude(is_confirmed=self._end_comparison(comparison))
        return self.current

    def record(self, ns: int, part: int = 0) -> None:
        """Record the duration of one part of the current step, unless the tuner times turns."""
        if self._comparison is not None and self.is_timed and not self._rules.is_timed_by_turn:
            self._comparison.record(ns, part)

    def spoil(self) -> None:
        """Discard the times of the current step: something else ran, or ran beside it."""
        self.is_timed = False
        self._drift.spoil()
        self._turn_began_ns = None

    def spend(self, ns: int) -> None:
        """Note that the current step waited so long for a compile."""
        self._spent_ns += ns
        self._budget.spend(ns)

    # -------------------------------------------------------------------------------------------------------- its parts

    def _compare(self, variants: Sequence[Variant]) -> None:
        """Compare these variants from the next step on."""
        ordered = self._candidates.in_order(variants)
        if len(ordered) == 1:
            self._comparison = None
            if self.verdict is None:
                alone = Standing(name=ordered[0], step_ns=0.0, ratio=1.0, num_rounds=0)
                self.verdict = Verdict(standings=(alone,), num_steps=0)
            self.winner = ordered[0]
            self._conclude()
            return
        self._comparison = Comparison(ordered, self._required, self._rules)
        self._num_to_skip = 0
        self._note_remaining()

    def _run_step_of(self, comparison: Comparison, chosen: Variant) -> Variant:
        if comparison.is_in_first_step:
            if not _is_disturbed(self):
                self._trim()
            self._note_remaining()
        if self._rules.is_timed_by_turn and comparison.num_timed == 1:
            self._turn_began_ns = self._now_ns()
        self.is_timed = comparison.num_timed > 0
        self.current = chosen
        return chosen

    def _conclude(self, *, is_confirmed: bool = False) -> None:
        """Compare the next late candidate, if it is urgent; else the verdict is final."""
        assert self.verdict is not None
        urgent = self._candidates.urgent(self.verdict)
        if urgent is not None:
            self._add_late(urgent)
        if self._comparison is None:
            self._settle_on(self.winner, is_confirmed=is_confirmed)
            if self.verdict.is_measured:
                _logger.info("%s: chosen by measuring: %s", self._name, self.verdict)
            self._tell(self.verdict)

    def _settle_on(self, variant: Variant, *, is_confirmed: bool = False) -> None:
        self.current = self.winner = variant
        known = None if self._rules.is_timed_by_turn else self.verdict  # the host may be ahead of a device
        self._drift.restart(is_confirmed=is_confirmed, least_ns=0.0 if known is None else known.remembered_ns)
        self._num_to_skip = 0 if self.is_watched or self._candidates.late else math.inf
        self._remaining = ()
        self._note_remaining()

    def _note_remaining(self) -> None:
        if (remaining := self.remaining) != self._remaining:
            self._remaining = remaining
            self._keep(remaining)

    # ---------------------------------------------------------------------------------------------- after the verdict

    def _watch_step(self, now_ns: int) -> bool:
        """Look at a step of the winner that begins; return whether a comparison begins."""
        if not self._candidates:
            return False
        self._num_to_skip = LOOK_EVERY - 1
        self._budget.note_steps(LOOK_EVERY)
        if self._unready() is not None:
            return False
        due = self._candidates.due(self._budget.allows)
        if self._candidates.urgent(self.verdict) is not None:  # its compile was interrupted
            self._conclude()
        elif due is not None:
            self._add_late(due)
        elif self.is_watched and self._drift.has_drifted(now_ns, is_usual=not _is_disturbed(self)):
            self._candidates.restore_losers()
            if len(others := self._candidates.compiled()) > 1:
                self._is_after_drift = True
                self._compare(others)
        return self._comparison is not None

    def _add_late(self, variant: Variant) -> None:
        """Compile a late candidate, and compare it with the winner."""
        begin = self.clock()
        self._trim()
        try:
            self._candidates.prepare(variant)
        except CandidateError as error:
            _logger.warning("%s: %s is not compared: %s", self._name, variant, error)
        else:
            self._compare([self.winner, variant])
        finally:
            self.spend(self.clock() - begin)


def _disturbs(other: Tuner, tuner: Tuner) -> bool:
    """Return whether another tuner compares now, and its steps are still taken."""
    return other is not tuner and other.is_comparing and other.last_ns + ABANDONED_NS > tuner.last_ns


def _is_disturbed(tuner: Tuner) -> bool:
    """Return whether another tuner compares, so that steps do not take their usual time."""
    return any(_disturbs(other, tuner) for each in list(_tuners) if (other := each()) is not None)


def _may_compare(tuner: Tuner) -> bool:
    """Return whether no other tuner that times turns is comparing; then this one does."""
    global _comparing
    other = None if _comparing is None else _comparing()
    if other is not None and _disturbs(other, tuner):
        return False
    _comparing = weakref.ref(tuner)
    return True


_tuners: list[weakref.ref[Tuner]] = []
"""All tuners of this process."""

_comparing: weakref.ref[Tuner] | None = None
"""The tuner that times turns now."""
