"""Which candidate runs when, on a clock: late ones and their budget, drops, verdicts of earlier processes, turns."""

from __future__ import annotations

import pytest

from apollo_compile.autotune.candidates import Candidate
from apollo_compile.autotune.comparison import PER_CALL, PER_TURN, Rules
from apollo_compile.autotune.drift import DRIFT_SAMPLES, LOOK_EVERY
from apollo_compile.autotune.tuner import ABANDONED_NS
from apollo_compile.ir import MIN_ROUNDS, Variant
from tests.autotune.machine import ENOUGH, INDUCTOR, LOOP, MS, PLAN, SERIAL, TRACED, S, Subject, earlier


def test_a_late_candidate_is_compiled_when_that_is_a_small_share_of_the_training_time() -> None:
    """One step waits for it; then it is compared with the winner alone, and the verdict has all. Of none, never."""
    subject = Subject({SERIAL: 20, PLAN: 10, INDUCTOR: 8})
    subject.offer(subject.late(INDUCTOR, cost_s=1.0), SERIAL, PLAN)
    subject.run(200)
    settled_ns = sum(round(subject.times[each] * MS) for each in subject.used[: subject.verdicts[0].num_steps])
    assert subject.winners == [PLAN] and subject.tuner.is_more_to_come and subject.prepared == []
    while not subject.prepared:
        subject.step()
    assert 20 * S <= subject.now_ns - settled_ns <= 23 * S  # 5 % of it, and a second for the compile
    before = len(subject.used)
    subject.run(ENOUGH)
    assert set(subject.used[before:]) == {PLAN, INDUCTOR} and subject.winners == [PLAN, INDUCTOR]
    ratios = {each.name: each.ratio for each in subject.verdicts[-1].standings}
    assert ratios == pytest.approx({INDUCTOR: 1.0, PLAN: 10 / 8, SERIAL: 20 / 8})
    assert subject.verdicts[-1].prepare_ns == S and not subject.tuner.is_more_to_come
    without = Subject({SERIAL: 20, PLAN: 10, INDUCTOR: 8}, share=0.0)
    without.offer(without.late(INDUCTOR, cost_s=0.0), SERIAL, PLAN)
    without.run(10 * ENOUGH)
    assert without.prepared == [] and without.winners == [PLAN]


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_candidate_that_cannot_be_compiled_is_tried_once(is_urgent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The others have their verdict, and one warning says why."""
    subject = Subject({SERIAL: 20, PLAN: 10})
    subject.offer(subject.late(INDUCTOR, cost_s=0.1, fails=True, is_urgent=lambda verdict: is_urgent), SERIAL, PLAN)
    subject.run(5 * ENOUGH)
    assert subject.winners == [PLAN] and subject.prepared == [INDUCTOR] and subject.used[-1] == PLAN
    warnings = [line for line in caplog.messages if "is not compared" in line]
    assert warnings == ["a step: Inductor is not compared: no compiler"]


def test_a_candidate_that_compiles_in_its_own_steps_is_not_timed_until_it_is_ready() -> None:
    """As a traced step, which needs a batch to be compiled."""
    subject = Subject({LOOP: 20, TRACED: 8, PLAN: 10})
    answers = iter(3 * [False])
    late = Candidate(variant=TRACED, is_late=True, cost_ns=0, is_ready=lambda: next(answers, True))
    subject.offer(LOOP, late, PLAN)
    while TRACED not in subject.used:
        subject.step()
    assert not subject.tuner.is_timed and not subject.tuner.is_settled
    subject.run(ENOUGH)
    assert subject.winners == [PLAN, TRACED]


def test_what_fails_is_dropped_and_the_others_are_compared() -> None:
    """A comparison goes on without it; after a verdict all others are compared again, a late loser included."""
    subject = Subject({LOOP: 20, SERIAL: 15, PLAN: 10}).offer(LOOP, SERIAL, PLAN, incumbent=LOOP)
    subject.run(5)
    subject.tuner.drop(SERIAL)
    subject.run(ENOUGH)
    assert SERIAL not in subject.used[5:] and subject.winners == [PLAN]
    subject.tuner.drop(PLAN)
    subject.run(ENOUGH)
    assert subject.used[-1] == LOOP and subject.winners == [PLAN, LOOP]
    subject = Subject({LOOP: 10, PLAN: 9, INDUCTOR: 20})
    subject.offer(LOOP, subject.late(INDUCTOR, cost_s=0.0), PLAN, incumbent=LOOP)
    while INDUCTOR not in subject.used:
        subject.step()
    subject.tuner.drop(PLAN)
    subject.run(ENOUGH)
    assert subject.winners[-1] == LOOP and subject.used[-1] == LOOP


@pytest.mark.parametrize("fails", [False, True])
def test_the_winner_of_an_earlier_process_is_compiled_first(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is compared, unless it does not compile any more: then the others are."""
    subject = Subject({SERIAL: 20, PLAN: 10, INDUCTOR: 8})
    subject.adopt(earlier(INDUCTOR, PLAN), subject.late(INDUCTOR, fails=fails), SERIAL, PLAN)
    subject.run(ENOUGH if fails else 10)
    assert subject.prepared == [INDUCTOR]
    if fails:
        assert subject.winners == [PLAN]
        assert (
            "the fastest of an earlier run, cannot be compiled, so the others are compared: no compiler" in caplog.text
        )
    else:
        assert set(subject.used) == {INDUCTOR}


@pytest.mark.parametrize(("margin", "compared"), [(0.02, {LOOP, SERIAL, PLAN}), (0.03, {SERIAL, PLAN}), (0.06, {PLAN})])
def test_close_variants_of_an_earlier_process_are_compared_again(margin: float, compared: set[Variant]) -> None:
    """Within 5 % of the winner; a late one would have to be compiled for that, so it is left out."""
    subject = Subject({LOOP: 20, INDUCTOR: 1, SERIAL: 15, PLAN: 16})
    known = earlier(PLAN, SERIAL, LOOP, INDUCTOR, margin=margin)
    subject.adopt(known, LOOP, subject.late(INDUCTOR), SERIAL, PLAN)
    subject.run(ENOUGH)
    assert set(subject.used) == compared and subject.used[-1] == (SERIAL if SERIAL in compared else PLAN)
    assert subject.prepared == [] and subject.tuner.is_settled
    if subject.verdicts:
        (verdict,) = subject.verdicts
        assert not verdict.is_remembered and verdict.num_steps > known.num_steps
        assert {each.name for each in verdict.standings} == {LOOP, SERIAL, PLAN, INDUCTOR}


@pytest.mark.parametrize(
    ("step_ms", "rules", "is_compared"),
    [(6, PER_CALL, True), (9, PER_CALL, False), (20, PER_CALL, False), (6, PER_TURN, False)],
)
def test_a_verdict_of_an_earlier_process_whose_winner_was_slower_than_steps_are_now_is_made_again(
    step_ms: float, rules: Rules, is_compared: bool
) -> None:
    """Doubt a verdict that was found beside other work: its winner alone took 10 ms a step. A host may be ahead."""
    subject = Subject({LOOP: step_ms / 2, PLAN: step_ms, INDUCTOR: step_ms / 3}, rules=rules)
    subject.adopt(earlier(PLAN, LOOP, INDUCTOR, step_ns=10 * MS), LOOP, subject.late(INDUCTOR), PLAN)
    subject.run(2 * DRIFT_SAMPLES * LOOK_EVERY + ENOUGH)
    assert subject.winners == is_compared * [LOOP] and subject.prepared == []


def test_where_sizes_change_nothing_is_watched() -> None:
    """Times of other sizes are no drift."""
    subject = Subject({SERIAL: 20, PLAN: 10}, is_watched=False).offer(SERIAL, PLAN)
    subject.run(100)
    subject.times[PLAN] = 100
    subject.run(ENOUGH)
    assert subject.winners == [PLAN] and subject.tuner.skip_step()


def test_turns_are_timed_from_border_to_border() -> None:
    """With everything that a step has besides, and without waiting for the device in between."""
    subject = Subject({SERIAL: 13, PLAN: 10}, rules=PER_TURN)
    asked: list[int] = []
    subject.tuner._now_ns = lambda: asked.append(subject.now_ns) or subject.now_ns  # type: ignore[func-returns-value]
    subject.offer(SERIAL, PLAN)
    subject.run(ENOUGH)
    (verdict,) = subject.verdicts
    assert verdict.standings[1].ratio == pytest.approx(1.3) and verdict.standings[0].step_ns == pytest.approx(10 * MS)
    assert len(asked) == 2 * 2 * MIN_ROUNDS
    assert subject.used[:16] == 16 * [PLAN]  # a warm-up of four steps, two untimed ones, and ten
    subject.times[PLAN] = 14
    subject.run(6 * DRIFT_SAMPLES * LOOK_EVERY)
    assert subject.winners == [PLAN, SERIAL]


def test_a_turn_with_another_step_in_it_does_not_count() -> None:
    """A step of another program in between is timed too."""
    subject = Subject({SERIAL: 13, PLAN: 10}, rules=PER_TURN).offer(SERIAL, PLAN)
    for number in range(300):
        subject.step()
        if number % 12 == 5 and number < 60:
            subject.now_ns += S
            subject.tuner.spoil()
    assert subject.verdicts[0].standings[0].step_ns == pytest.approx(10 * MS)


def test_one_of_the_tuners_that_time_turns_compares_at_a_time() -> None:
    """Each step has the work of all of them; one that is not called any more holds up nobody."""
    first, second = (Subject({SERIAL: 13, PLAN: 10}, rules=PER_TURN).offer(SERIAL, PLAN) for _ in range(2))
    while not first.verdicts:
        first.step()
        second.now_ns = first.now_ns
        second.step()
    assert set(second.used) == {PLAN}
    second.run(ENOUGH)
    assert second.winners == [PLAN]
    third, fourth = (Subject({SERIAL: 13, PLAN: 10}, rules=PER_TURN).offer(SERIAL, PLAN) for _ in range(2))
    third.step()
    fourth.run(5)
    assert set(fourth.used) == {PLAN} and fourth.tuner.is_comparing
    fourth.now_ns = third.now_ns + ABANDONED_NS
    fourth.run(ENOUGH)
    assert fourth.winners == [PLAN]


def test_memory_is_trimmed_before_every_turn_unless_another_tuner_is_timing() -> None:
    """And before a late candidate is compiled."""
    trimmed: list[int] = []
    subject = Subject({SERIAL: 13, PLAN: 10}, trim_memory=lambda: trimmed.append(0)).offer(SERIAL, PLAN)
    subject.run(4 * 3)
    assert len(trimmed) == 4
    other = Subject({SERIAL: 13, PLAN: 10}).offer(SERIAL, PLAN)
    subject.run(ENOUGH)
    assert len(trimmed) == 4
    other.tuner.leave(PLAN)
    assert other.tuner.is_settled and other.tuner.current == PLAN
