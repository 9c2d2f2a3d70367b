"""Orders in which the ranks of a pipeline compute their stages.

    gpipe, one_forward_one_backward, interleaved (number of ranks, of micro-batches, ...) -> PipelineSchedule
    make_schedule(name, ..., times) -> the one of a name, for stages with these durations

The orders are those of torch.distributed.pipelining (`ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`), which
runs the plans. Sources: GPipe (arXiv 1811.06965); 1F1B (PipeDream-Flush, arXiv 2006.09503); interleaved 1F1B
(Megatron-LM, arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from apollo_compile.distributed.pipeline.values import Kind, Op, PipelineSchedule, StageTimes
from apollo_compile.errors import PipelinePlanError

ScheduleName = Literal["1f1b", "gpipe", "interleaved 1f1b"]


def make_schedule(
    name: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int, times: StageTimes
) -> PipelineSchedule:
    """Return the schedule of a name.

    Raises:
        PipelinePlanError: there is no such schedule, or the durations do not match its stages.
    """
    if name == "interleaved 1f1b":
        schedule = interleaved(num_ranks, stages_per_rank, num_microbatches)
    elif stages_per_rank != 1:
        raise PipelinePlanError(f"{name} has one stage per rank, got {stages_per_rank}; use 'interleaved 1f1b'")
    else:
        schedule = (gpipe if name == "gpipe" else one_forward_one_backward)(num_ranks, num_microbatches)
    for field, durations in (("forward_ns", times.forward_ns), ("backward_ns", times.backward_ns)):
        if len(durations) != schedule.num_stages or min(durations) < 0:
            raise PipelinePlanError(
                f"times.{field} has {len(durations)} durations, but there are {schedule.num_stages} stages "
                f"({num_ranks} ranks of {stages_per_rank}): expected one of at least 0 per stage, got {durations}"
            )
    return schedule


def gpipe(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Return the schedule in which every rank computes all forwards, then all backwards."""
    _require_positive(num_ranks, num_microbatches)
    orders = tuple(
        (
            *(Op(Kind.FORWARD, index, rank) for index in range(num_microbatches)),
            *(Op(Kind.BACKWARD, index, rank) for index in range(num_microbatches)),
        )
        for rank in range(num_ranks)
    )
    return _make("gpipe", num_ranks, 1, num_microbatches, orders)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Return the schedule in which, after the warm-up, one forward alternates with one backward."""
    _require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards = [Op(Kind.FORWARD, index, rank) for index in range(num_microbatches)]
        backwards = [Op(Kind.BACKWARD, index, rank) for index in range(num_microbatches)]
        orders.append(_alternate(forwards, backwards, min(num_microbatches, num_ranks - rank - 1)))
    return _make("1f1b", num_ranks, 1, num_microbatches, orders)


def interleaved(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> PipelineSchedule:
    """Return interleaved 1F1B: a rank has several stages, and takes them in turn for rounds of micro-batches.

    Raises:
        PipelinePlanError: the micro-batches do not divide into equal rounds.
    """
    _require_positive(num_ranks, stages_per_rank, num_microbatches)
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds:
        raise PipelinePlanError(
            f"interleaved 1F1B takes micro-batches in equal rounds: {num_microbatches} on {num_ranks} ranks would be "
            f"{num_rounds} rounds of unequal size; use a multiple of {num_rounds}"
        )
    size = num_microbatches // num_rounds
    orders = []
    for rank in range(num_ranks):
        steps = [(step // size, step) for step in range(num_microbatches * stages_per_rank)]
        places = [(chunk % stages_per_rank, chunk // stages_per_rank * size + step % size) for chunk, step in steps]
        forwards = [Op(Kind.FORWARD, index, chunk * num_ranks + rank) for chunk, index in places]
        backwards = [
            Op(Kind.BACKWARD, index, (stages_per_rank - 1 - chunk) * num_ranks + rank) for chunk, index in places
        ]
        num_warmup = (stages_per_rank - 1) * size + 2 * (num_ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, min(len(forwards), num_warmup)))
    return _make("interleaved 1f1b", num_ranks, stages_per_rank, num_microbatches, orders)


def _alternate(forwards: Sequence[Op], backwards: Sequence[Op], num_warmup: int) -> tuple[Op, ...]:
    steady = [op for pair in zip(forwards[num_warmup:], backwards, strict=False) for op in pair]
    return (*forwards[:num_warmup], *steady, *backwards[len(forwards) - num_warmup :])


def _make(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int, orders: Sequence[tuple[Op, ...]]
) -> PipelineSchedule:
    return PipelineSchedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks * stages_per_rank,
        num_microbatches=num_microbatches,
        orders=tuple(orders),
    )


def _require_positive(*counts: int) -> None:
    if min(counts) < 1:
        raise PipelinePlanError(f"a pipeline needs at least one rank, stage and micro-batch, got {min(counts)}")
