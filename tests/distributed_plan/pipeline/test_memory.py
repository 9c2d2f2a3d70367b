"""Live micro-batches, against a look at every point in time."""

from __future__ import annotations

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.values import Kind
from tests.distributed_plan.pipeline.problems import random_problem


def test_a_frozen_encoder_holds_a_microbatch_until_its_features_are_read() -> None:
    """A trained one until its backward has ended."""
    for seed in range(20):
        plan = fill(*random_problem(seed))
        for number, (encoder, live) in enumerate(zip(plan.encoders, plan.peak_live(), strict=True)):
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
