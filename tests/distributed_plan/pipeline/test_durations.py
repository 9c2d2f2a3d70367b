"""Which durations count, and which plan follows from them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apollo_compile.distributed.pipeline.durations import Durations, Orders, Piece, Samples, medians_of, plan_step
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, orders_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, Kind, StageTimes, one_replica_per_rank

STAGE, SEGMENT = Piece(Kind.FORWARD, 0), Piece(Kind.ENCODER_FORWARD, 1)
GUESS = Durations(
    times=StageTimes(forward_ns=(1, 1), backward_ns=(2, 2), transfer_ns=3),
    forward_ns=((1, 1, 1), (1,)),
    backward_ns=((2, 2, 2), ()),
)


def encoder_of(name: str, forward: tuple[int, ...], backward: tuple[int, ...]) -> Encoder:
    """Return an encoder with a replica on each of two ranks, as the planner knows it."""
    return Encoder(
        name=name,
        forward_ns=(forward,),
        backward_ns=(backward[::-1],) if backward else (),
        replicas=one_replica_per_rank(2),
    )


def test_measured_durations_replace_those_of_their_pieces_only() -> None:
    """Backwards are in the order of the forward; what is not measured stays."""
    found = {
        Piece(Kind.FORWARD, 1): 10,
        Piece(Kind.BACKWARD, 0): 20,
        Piece(Kind.ENCODER_FORWARD, 2): 30,
        Piece(Kind.ENCODER_BACKWARD, 0): 40,
        Piece(Kind.ENCODER_FORWARD, 0, 1): 50,
    }
    assert GUESS.with_measured(found) == Durations(
        times=StageTimes(forward_ns=(1, 10), backward_ns=(20, 2), transfer_ns=3),
        forward_ns=((1, 1, 30), (50,)),
        backward_ns=((40, 2, 2), ()),
    )


def test_the_first_step_in_which_a_piece_runs_is_not_counted() -> None:
    """Whichever step it is: a micro-batch without images compiles no encoder."""
    samples = Samples()
    for spans in ([(STAGE, 900)], [(STAGE, 10), (SEGMENT, 900), (SEGMENT, 800)], [(STAGE, 11), (SEGMENT, 5)]):
        assert not samples.is_due
        samples.begin_step()
        samples.end_step(spans)
    assert samples.is_due
    assert samples.take() == {STAGE: [10, 11], SEGMENT: [5]}


def test_ranks_compare_after_the_same_steps_whatever_failed() -> None:
    """After three, and if that was not enough after six and twelve; a failure counts once, and in its own time."""
    fine, failing = Samples(), Samples()
    due: list[tuple[int, bool, bool]] = []
    for step in range(1, 13):
        for samples in (fine, failing):
            samples.begin_step()
            if samples is fine or step not in (2, 6):
                samples.end_step([(STAGE, step)])
        assert fine.is_due == failing.is_due
        if fine.is_due:
            due.append((step, fine.take() is None, failing.take() is None))
    assert due == [(3, False, True), (6, False, True), (12, False, False)]


def test_medians_are_over_micro_batches_steps_and_ranks() -> None:
    """The lower one of two; never less than a nanosecond, which is what the planner can do with."""
    by_rank = [{STAGE: [7, 9]}, {SEGMENT: [4, 100, 5]}, {SEGMENT: [6, 5]}]
    assert medians_of(by_rank, {STAGE, SEGMENT}) == {STAGE: 7, SEGMENT: 5}
    assert medians_of([{STAGE: [0]}], {STAGE}) == {STAGE: 1}


@pytest.mark.parametrize("by_rank", [[{STAGE: [7]}, {}], [{STAGE: [7], SEGMENT: [7]}, None]])
def test_nothing_is_planned_while_something_is_missing(by_rank: list[dict[Piece, list[int]] | None]) -> None:
    """A piece that has not run twice, or a rank on which a step failed."""
    assert medians_of(by_rank, {STAGE, SEGMENT}) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_that_of_the_measured_durations_or_a_shorter_one_that_is_known(seed: int) -> None:
    """By simulation, which needs no planner."""
    rng = random.Random(seed)
    schedule = one_forward_one_backward(2, 4)
    guess = [encoder_of("images", (1, 1, 1), (2, 2, 2)), encoder_of("sounds", (1,), ())]
    wanted = {
        *(Piece(kind, stage) for kind in (Kind.FORWARD, Kind.BACKWARD) for stage in (0, 1)),
        *(Piece(kind, index) for kind in (Kind.ENCODER_FORWARD, Kind.ENCODER_BACKWARD) for index in (0, 1, 2)),
        Piece(Kind.ENCODER_FORWARD, 0, 1),
    }
    found = medians_of([{piece: [rng.randint(5, 90)] for piece in sorted(wanted, key=str)}], wanted)
    durations = GUESS.with_measured(found)
    encoders = [
        encoder_of(encoder.name, forward, backward)
        for encoder, forward, backward in zip(guess, durations.forward_ns, durations.backward_ns, strict=True)
    ]

    def simulated(orders: Orders, replica_of: tuple[tuple[int, ...], ...]) -> int:
        bars = simulate(schedule, durations.times, orders=orders, encoders=encoders, replica_of=replica_of)
        return end_of(bars, durations.times)

    filled, first = fill(schedule, durations.times, encoders), plan_step(schedule, guess, GUESS)
    lengths = {
        (orders_of(filled), filled.replica_of): simulated(orders_of(filled), filled.replica_of),
        (first.orders, first.replica_of): simulated(first.orders, first.replica_of),
    }
    plan = plan_step(schedule, guess, durations, known=[first])
    assert lengths[plan.orders, plan.replica_of] == min(lengths.values()) == plan.prediction.step_ns <= filled.step_ns
    assert (plan.prediction.plain_ns, plan.prediction.durations) == (filled.plain_ns, durations)


def test_a_longer_encoder_changes_the_plan() -> None:
    """Else there would be no reason to measure."""
    schedule = one_forward_one_backward(2, 4)
    encoders = [encoder_of("images", (1, 1, 1), (2, 2, 2))]
    guess = replace(GUESS, forward_ns=((1, 1, 1),), backward_ns=((2, 2, 2),))
    longer = guess.with_measured({Piece(Kind.ENCODER_FORWARD, 2): 9, Piece(Kind.ENCODER_BACKWARD, 2): 18})
    assert plan_step(schedule, encoders, guess).orders != plan_step(schedule, encoders, longer).orders
