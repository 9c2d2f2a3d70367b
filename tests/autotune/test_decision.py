"""A decision between candidates: what is known of it on the way, and its verdict."""

from __future__ import annotations

from apollo_compile.autotune.candidates import Candidate
from tests.autotune.machine import ENOUGH, INDUCTOR, PLAN, SERIAL, Subject


def test_there_is_nothing_to_compare_before_candidates_are_offered_and_of_a_single_one() -> None:
    """The plan runs without a verdict; then the one is the verdict."""
    subject = Subject({PLAN: 10, SERIAL: 10})
    subject.run(10)
    assert set(subject.used) == {PLAN} and not subject.tuner.is_settled and not subject.verdicts
    subject.offer(SERIAL)
    subject.step()
    assert [str(verdict) for verdict in subject.verdicts] == ["segments in turn; nothing could be compared with it"]
    assert subject.used[10:] == [SERIAL]


def test_the_plan_runs_first_and_the_fastest_last() -> None:
    """In every turn its candidate alone; the state tells the round and the times."""
    subject = Subject({SERIAL: 13, PLAN: 10}).offer(SERIAL, PLAN)
    assert (subject.tuner.steps_left, subject.tuner.progress) == (8 * 6, "segments in turn, plan")
    subject.run(4 * 3)
    assert subject.used == 3 * [PLAN] + 6 * [SERIAL] + 3 * [PLAN]
    subject.step()
    assert (subject.tuner.steps_left, subject.tuner.progress) == (6 * 6 - 1, "segments in turn 13.00 ms, plan 10.00 ms")
    assert 0.9 < subject.tuner.left_ns / (35 * 11.5e6) < 1.2
    subject.run(ENOUGH)
    assert subject.winners == [PLAN] and subject.tuner.is_settled
    assert (subject.tuner.steps_left, subject.tuner.left_ns, subject.tuner.progress) == (0, 0, "")
    assert subject.verdicts[0].summary == "1.30x as fast as segments in turn"
    assert subject.kept[0] == {SERIAL, PLAN} and subject.kept[-1] == {PLAN}


def test_the_steps_of_a_decision_are_known_before_it_begins() -> None:
    """A comparison of all that can run at once, and one of two for each candidate that is urgent then."""
    subject = Subject({SERIAL: 13, PLAN: 10})
    own = [Candidate(variant=SERIAL), Candidate(variant=PLAN)]
    alone = subject.tuner.expected_steps(own)
    late = subject.late(INDUCTOR)
    urgent = subject.late(INDUCTOR, is_urgent=lambda verdict: True)
    assert subject.tuner.expected_steps([late, *own]) == alone == 8 * 6
    assert subject.tuner.expected_steps([urgent, *own]) == 2 * alone
