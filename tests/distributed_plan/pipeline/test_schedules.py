"""Schedules: every operation once, and steps as long as theory says."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.schedules import gpipe, interleaved, one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, simulate
from apollo_compile.distributed.pipeline.values import Kind, Op, PipelineSchedule, StageTimes
from apollo_compile.errors import PipelinePlanError

F, B = 7, 13
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 5) for microbatches in (1, 2, 4, 10)]


def step_of(schedule: PipelineSchedule) -> int:
    """Return the length of a step with equal stages."""
    times = StageTimes(forward_ns=(F,) * schedule.num_stages, backward_ns=(B,) * schedule.num_stages)
    return end_of(simulate(schedule, times), times)


def assert_complete(schedule: PipelineSchedule) -> None:
    """Every operation is there once, on the rank of its stage."""
    for rank, order in enumerate(schedule.orders):
        expected = {
            Op(kind, index, stage)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for index in range(schedule.num_microbatches)
            for stage in range(rank, schedule.num_stages, schedule.num_ranks)
        }
        assert len(order) == len(expected) and set(order) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
def test_one_stage_per_rank_takes_all_microbatches_and_the_way_through(make, ranks, microbatches) -> None:
    """(m + p - 1)(F + B), of both schedules; they differ in what they hold."""
    schedule = make(ranks, microbatches)
    assert_complete(schedule)
    assert step_of(schedule) == (microbatches + ranks - 1) * (F + B)


@pytest.mark.parametrize(("ranks", "chunks", "rounds"), [(1, 2, 3), (2, 2, 1), (2, 3, 2), (4, 2, 2), (8, 12, 2)])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks: int, chunks: int, rounds: int) -> None:
    """(m v + p - 1)(F + B) with v stages of F and B per rank."""
    schedule = interleaved(ranks, chunks, ranks * rounds)
    assert_complete(schedule)
    assert step_of(schedule) == (ranks * rounds * chunks + ranks - 1) * (F + B)


def test_one_forward_one_backward_holds_as_many_microbatches_as_stages_follow() -> None:
    """GPipe holds all of them."""
    for rank, order in enumerate(one_forward_one_backward(4, 9).orders):
        held = [0]
        for op in order:
            held.append(held[-1] + (1 if op.kind is Kind.FORWARD else -1))
        assert max(held) == 4 - rank


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 10), (4, 3), (3, 6)])
def test_interleaving_takes_rounds_of_other_sizes(ranks: int, microbatches: int) -> None:
    """As torch does: any number that divides into equal rounds."""
    schedule = interleaved(ranks, 2, microbatches)
    assert_complete(schedule)
    assert step_of(schedule) >= (microbatches * 2 + ranks - 1) * (F + B)


def test_what_is_no_pipeline_is_refused() -> None:
    """With what to do."""
    with pytest.raises(PipelinePlanError, match="11 on 4 ranks would be 2 rounds of unequal size; use a multiple of 2"):
        interleaved(4, 2, 11)
    with pytest.raises(PipelinePlanError, match="at least one rank"):
        one_forward_one_backward(0, 4)
