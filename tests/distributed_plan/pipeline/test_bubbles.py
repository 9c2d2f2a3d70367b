"""Free time of devices, forwards that are delayed for free, and pauses."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.bubbles import FOREVER, PipelineTimeline, bubbles_of, delay_forwards
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, inputs_of, simulate
from apollo_compile.distributed.pipeline.values import Gaps, Kind, StageTimes
from tests.distributed_plan.pipeline.problems import random_problem


@pytest.mark.parametrize("seed", range(20))
def test_bubbles_and_work_are_the_step(seed: int) -> None:
    """On every device, without gaps inside operations."""
    plan = fill(*random_problem(seed))
    bubbles = bubbles_of(plan.bars, plan.num_devices, plan.schedule.num_ranks, plan.step_ns)
    for device, free in enumerate(bubbles):
        busy = sum(bar.end_ns - bar.start_ns for bar in plan.bars if bar.device == device)
        assert busy + sum(end - begin for begin, end in free) == plan.step_ns
        assert all(end > begin for begin, end in free)


@pytest.mark.parametrize("seed", range(20))
def test_delayed_forwards_delay_nothing_else(seed: int) -> None:
    """No backward moves, no forward moves to the front, everything is there when it is read."""
    schedule, times, _ = random_problem(seed)
    plain = simulate(schedule, times)
    delayed = delay_forwards(plain, schedule, times)
    by_op = {bar.op: bar for bar in delayed}
    for bar in plain:
        later = by_op[bar.op]
        assert later.start_ns == bar.start_ns if bar.op.kind is Kind.BACKWARD else later.start_ns >= bar.start_ns
        for other in inputs_of(bar.op, schedule.num_stages - 1, ()):
            transfer = times.transfer_ns if by_op[other].device != later.device else 0
            assert by_op[other].end_ns + transfer <= later.start_ns
    for order in schedule.orders:
        ends = [by_op[op].end_ns for op in order]
        assert all(end <= by_op[op].start_ns for end, op in zip(ends, order[1:], strict=False))
    assert end_of(delayed, times) == end_of(plain, times)


def test_the_last_forwards_of_the_warm_up_can_wait() -> None:
    """On the first of three ranks the first backward comes long after the third forward; the first one cannot wait."""
    schedule = one_forward_one_backward(3, 4)
    times = StageTimes(forward_ns=(10,) * 3, backward_ns=(20,) * 3)
    plain = simulate(schedule, times)
    moved = {
        bar.op.microbatch: later.start_ns - bar.start_ns
        for bar, later in zip(plain, delay_forwards(plain, schedule, times), strict=True)
        if bar.op.kind is Kind.FORWARD and bar.device == 0
    }
    assert moved[0] == 0 and moved[1] > 0 and moved[2] > 0


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


def test_a_walk_yields_gaps_and_ends_in_free_time() -> None:
    """Two gaps of four nanoseconds in an operation of thirty: after eleven and after as many more."""
    schedule = one_forward_one_backward(1, 1)
    gaps = Gaps(count=2, duration_ns=4)
    times = StageTimes(forward_ns=(30,), backward_ns=(40,), lead_ns=5, forward_gaps=gaps)
    line = PipelineTimeline(simulate(schedule, times), schedule, times)
    assert [free[1:] for free in line.walk(0, 0, 0, 2, 1)] == [(0, 5), (16, 20), (31, 35), (75, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 18, 2, 1)] == [(18, 20), (31, 35), (75, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 0, 2, 5)] == [(0, 5), (75, FOREVER)]
    assert [free[1:] for free in line.walk(0, 0, 0, 1, 1)] == [(0, 5), (16, 20), (31, 35), (35, FOREVER)]
