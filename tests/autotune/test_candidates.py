"""Candidates that are compiled late, and the share of the training time that their compiles may take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apollo_compile.autotune.candidates import MAX_STEP_NS, Candidate, CandidateError, Candidates, CompileBudget
from tests.autotune.machine import INDUCTOR, PLAN, SERIAL, TRACED, S, earlier


def late(variant: Any, error: type[BaseException] | None = None, **rest: Any) -> Candidate:
    """Return a candidate that is compiled late, or fails to be."""

    def prepare() -> None:
        if error is not None:
            raise error

    return Candidate(variant=variant, prepare=prepare, cost_ns=5, is_late=True, **rest)


@pytest.mark.parametrize(("error", "left"), [(CandidateError, (INDUCTOR,)), (KeyboardInterrupt, (TRACED, INDUCTOR))])
def test_a_candidate_that_fails_is_forgotten_and_one_that_is_interrupted_is_not(
    error: type[BaseException], left: tuple[str, ...]
) -> None:
    """It is still the first to be compiled then."""
    candidates = Candidates([late(TRACED, error), late(INDUCTOR), Candidate(variant=PLAN)])
    with pytest.raises(error):
        candidates.prepare(TRACED)
    assert (candidates.compiled(), candidates.late) == ([PLAN], left)


def test_losers_of_an_earlier_process_wait_until_they_are_wanted_again() -> None:
    """They come before those that were never compared."""
    candidates = Candidates([late(TRACED), late(INDUCTOR), Candidate(variant=PLAN)])
    candidates.leave_out_losers(earlier(PLAN, INDUCTOR))
    assert (candidates.compiled(), candidates.late) == ([PLAN], (TRACED,))
    candidates.restore_losers()
    assert candidates.late == (INDUCTOR, TRACED)


def test_a_candidate_is_urgent_or_unready_as_it_says() -> None:
    """A verdict of an earlier process makes none urgent; one that compiles in its own steps is unready till then."""
    candidates = Candidates([late(INDUCTOR, is_urgent=lambda verdict: verdict.winner == PLAN), late(TRACED)])
    assert candidates.num_comparisons == 1
    assert candidates.urgent(replace(earlier(PLAN, SERIAL), is_remembered=False)) == INDUCTOR
    assert candidates.urgent(None) is candidates.urgent(earlier(PLAN, SERIAL)) is None
    slow = Candidates([Candidate(variant=TRACED, is_ready=lambda: False), Candidate(variant=PLAN)])
    assert slow.unready([PLAN, SERIAL]) is None and slow.unready([PLAN, TRACED]) == TRACED


def test_a_pause_is_no_training_time() -> None:
    """A notebook that waits for its user for a day has trained for a minute meanwhile."""
    now = [0]
    budget = CompileBudget(0.05, lambda: now[0])
    budget.note_steps()
    now[0] = 24 * 3600 * S
    budget.note_steps()
    assert budget.allows(MAX_STEP_NS // 20) and not budget.allows(MAX_STEP_NS // 20 + 1)
    budget.spend(1)
    assert not budget.allows(MAX_STEP_NS // 20)
