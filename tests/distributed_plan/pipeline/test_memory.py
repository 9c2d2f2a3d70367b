"""Peaks of memory, against a look at every point in time."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.memory import Footprint, peak_bytes, peak_live, peak_of
from apollo_compile.distributed.pipeline.schedules import gpipe, one_forward_one_backward
from apollo_compile.distributed.pipeline.values import FilledPlan, Kind, StageTimes
from tests.distributed_plan.pipeline.problems import random_problem


def held_at(plan: FilledPlan, footprint: Footprint, device: int, time_ns: int) -> int:
    """Return what a device holds at one time."""
    ranks = plan.schedule.num_ranks
    total = sum(size for stage, size in enumerate(footprint.stage_bytes) if stage % ranks == device % ranks)
    for stage in range(device % ranks, plan.schedule.num_stages, ranks):
        for index in range(plan.schedule.num_microbatches):
            own = [b for b in plan.bars if not b.op.is_encoder and (b.op.stage, b.op.microbatch) == (stage, index)]
            if min(b.start_ns for b in own) <= time_ns < max(b.end_ns for b in own):
                total += footprint.stage_activation_bytes[stage]
    for number, encoder in enumerate(plan.encoders):
        for replica, devices in enumerate(encoder.replicas):
            if device in devices:
                total += footprint.encoder_bytes[number]
                for index, place in enumerate(plan.replica_of[number]):
                    own = [
                        b
                        for b in plan.bars
                        if b.device == device
                        and b.op.is_encoder
                        and (b.op.encoder, b.op.microbatch, place) == (number, index, replica)
                    ]
                    if own and min(b.start_ns for b in own) <= time_ns < max(b.end_ns for b in own):
                        total += footprint.encoder_activation_bytes[number]
    return total


@pytest.mark.parametrize("seed", range(9))
def test_peaks_are_the_most_that_is_held_at_any_time(seed: int) -> None:
    """Of stages, weights and encoders, on every device."""
    plan = fill(*random_problem(seed, columns=1 + seed % 2))
    footprint = Footprint(
        stage_bytes=tuple(1000 + stage for stage in range(plan.schedule.num_stages)),
        stage_activation_bytes=tuple(10 + stage for stage in range(plan.schedule.num_stages)),
        encoder_bytes=(500, 300)[: len(plan.encoders)],
        encoder_activation_bytes=(7, 5)[: len(plan.encoders)],
    )
    times = sorted({bar.start_ns for bar in plan.bars})
    expected = [max(held_at(plan, footprint, device, now) for now in times) for device in range(plan.num_devices)]
    assert list(peak_bytes(plan, footprint)) == expected


def test_schedules_differ_in_what_they_hold() -> None:
    """GPipe all micro-batches, 1F1B as many as ranks follow."""
    times = StageTimes(forward_ns=(10,) * 3, backward_ns=(20,) * 3)
    footprint = Footprint(stage_bytes=(0,) * 3, stage_activation_bytes=(1,) * 3)
    assert peak_bytes(fill(gpipe(3, 7), times, ()), footprint) == (7, 7, 7)
    assert peak_bytes(fill(one_forward_one_backward(3, 7), times, ()), footprint) == (3, 2, 1)


def test_a_frozen_encoder_holds_a_microbatch_until_its_features_are_read() -> None:
    """A trained one until its backward has ended."""
    for seed in range(20):
        plan = fill(*random_problem(seed))
        for number, (encoder, live) in enumerate(zip(plan.encoders, peak_live(plan), strict=True)):
            spans = []
            for index in range(plan.schedule.num_microbatches):
                own = [b for b in plan.bars if b.op.is_encoder and (b.op.encoder, b.op.microbatch) == (number, index)]
                reads = [
                    b.start_ns
                    for b in plan.bars
                    if b.op.kind is Kind.FORWARD and (b.op.microbatch, b.op.stage) == (index, encoder.feeds)
                ]
                end = reads[0] if encoder.is_frozen else max(b.end_ns for b in own)
                spans.append((min(b.start_ns for b in own), end))
            for replica, most in enumerate(live):
                mine = [span for index, span in enumerate(spans) if plan.replica_of[number][index] == replica]
                assert most == max((sum(a <= now < b for a, b in mine) for now, _ in mine), default=0)


def test_an_interval_that_ends_when_another_begins_does_not_overlap_with_it() -> None:
    """Memory is released before it is taken."""
    assert peak_of([(0, 5, 3), (5, 9, 4), (4, 6, 1)]) == 5
    assert peak_of([]) == 0
