"""The rules of a filled pipeline, checked bar by bar."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from apollo_compile.distributed.pipeline.simulate import duration_of, inputs_of, stages_of
from apollo_compile.distributed.pipeline.values import Bar, FilledPlan, Filling, Kind, Op


def check_plan(plan: FilledPlan) -> None:
    """Assert every rule at the top of `fill.py`."""
    segments = [bar for whole in plan.bars for bar in _split(whole, plan)]
    by_op = {bar.op: bar for bar in segments}
    assert sorted(map(str, by_op)) == sorted(map(str, _operations(plan))) and len(by_op) == len(segments)
    for op, bar in by_op.items():
        assert bar.device == _device_of(op, plan)
        for other in inputs_of(op, plan.schedule.num_stages - 1, plan.encoders):
            source = by_op[other]
            assert source.end_ns + plan.times.transfer_ns * (source.device != bar.device) <= bar.start_ns, op
    for rank, order in enumerate(plan.schedule.orders):
        pipeline = [bar for bar in plan.bars if bar.device == rank and not bar.op.is_encoder]
        assert [bar.op for bar in pipeline] == list(order)
        assert all(bar.start_ns >= plan.times.lead_ns for bar in pipeline)
        for device in range(rank, plan.num_devices, plan.schedule.num_ranks):
            own = [bar for bar in plan.bars if bar.device == device and bar.op.is_encoder]
            busy = [(bar.start_ns, bar.end_ns) for bar in (*own, *pipeline)]
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(busy))), device
            if plan.filling is Filling.COARSE:
                assert all(b.end_ns <= pipeline[0].start_ns or b.start_ns >= pipeline[-1].end_ns for b in own)
    for encoder, live in zip(plan.encoders, plan.peak_live(), strict=True):
        assert encoder.max_live is None or max(live) <= encoder.max_live
    assert plan.step_ns == max(bar.end_ns + plan.times.trail_ns * (not bar.op.is_encoder) for bar in plan.bars)


def _operations(plan: FilledPlan) -> Iterator[Op]:
    for microbatch in range(plan.schedule.num_microbatches):
        for index, encoder in enumerate(plan.encoders):
            for kind in (Kind.ENCODER_FORWARD, Kind.ENCODER_BACKWARD):
                for stage, segments in enumerate(stages_of(kind, encoder)):
                    yield from (Op(kind, microbatch, stage, index, segment) for segment in range(len(segments)))
        for stage in range(plan.schedule.num_stages):
            yield from (Op(kind, microbatch, stage) for kind in (Kind.FORWARD, Kind.BACKWARD))


def _device_of(op: Op, plan: FilledPlan) -> int:
    if not op.is_encoder:
        return op.stage % plan.schedule.num_ranks
    devices = plan.encoders[op.encoder].replicas[plan.replica_of[op.encoder][op.microbatch]]
    return devices[op.stage] if op.kind is Kind.ENCODER_FORWARD else devices[-1 - op.stage]


def _split(whole: Bar, plan: FilledPlan) -> Iterator[Bar]:
    """Yield a bar per segment; together they are as long as the bar."""
    start_ns = whole.start_ns
    for segment in range(whole.op.segment, whole.op.segment + whole.num_segments):
        op = whole.op._replace(segment=segment)
        yield Bar(op, whole.device, start_ns, start_ns := start_ns + duration_of(op, plan.times, plan.encoders))
    assert start_ns == whole.end_ns, whole.op
