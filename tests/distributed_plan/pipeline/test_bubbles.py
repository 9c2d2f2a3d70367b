"""Free time of devices, and pauses."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.bubbles import FOREVER, PipelineTimeline, bubbles_of
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, simulate
from apollo_compile.distributed.pipeline.values import Kind, StageTimes
from tests.distributed_plan.pipeline.problems import random_problem


@pytest.mark.parametrize("seed", range(20))
def test_bubbles_and_work_are_the_step(seed: int) -> None:
    """On every device."""
    plan = fill(*random_problem(seed))
    bubbles = bubbles_of(plan.bars, plan.num_devices, plan.schedule.num_ranks, plan.step_ns)
    for device, free in enumerate(bubbles):
        busy = sum(bar.end_ns - bar.start_ns for bar in plan.bars if bar.device == device)
        assert busy + sum(end - begin for begin, end in free) == plan.step_ns
        assert all(end > begin for begin, end in free)


def test_a_pause_moves_what_starts_later_and_opens_a_bubble_on_every_rank() -> None:
    """By its duration."""
    schedule = one_forward_one_backward(2, 2)
    times = StageTimes(forward_ns=(10, 10), backward_ns=(20, 20))
    line = PipelineTimeline(simulate(schedule, times), schedule, times)
    before = line.bars()
    at = line.plain_start(Kind.FORWARD, 1, 0)
    line.pause(at, 7)
    for bar, later in zip(before, line.bars(), strict=True):
        assert later.start_ns - bar.start_ns == (7 if bar.start_ns >= at else 0)
    assert line.pipeline_end_ns == end_of(before, times) + 7
    assert line.without_pauses().bars() == before


def test_a_walk_yields_what_is_long_enough_and_ends_in_free_time() -> None:
    """Between a forward and a backward of one rank of two, and from a stop on whatever comes."""
    times = StageTimes(forward_ns=(30, 10), backward_ns=(40, 5), lead_ns=5)
    schedule = one_forward_one_backward(2, 1)
    line = PipelineTimeline(simulate(schedule, times), schedule, times)
    assert [free[1:] for free in line.walk(0, 0, 0, 2, 1)] == [(0, 5), (35, 50), (90, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 38, 2, 1)] == [(38, 50), (90, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 0, 2, 6)] == [(35, 50), (90, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 0, 1, 1)] == [(0, 5), (35, FOREVER)]
