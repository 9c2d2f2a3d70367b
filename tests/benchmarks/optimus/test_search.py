"""Parallel plans of an encoder: which fit, which devices they use, and which is best."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.values import Encoder, Filling, StageTimes
from apollo_compile.errors import PipelinePlanError
from benchmarks.optimus.search import EncoderPlan, choose_plan, encoder_plans, place_replicas

MODEL = {"pipeline_parameters": 64_000, "encoder_parameters": 16_000, "activation_bytes": 100}


def test_plans_divide_the_pipeline_and_fit() -> None:
    """Four ranks of two devices; a replica on one device needs 6 x 16,000 bytes and an eighth of the pipeline's."""
    plans = encoder_plans(pipeline_parallel=4, tensor_parallel=2, memory_bytes=10**9, **MODEL)
    assert {(p.pipeline_parallel, p.tensor_parallel) for p in plans} == {(d, t) for d in (1, 2, 4) for t in (1, 2)}
    by_shape = {(p.pipeline_parallel, p.tensor_parallel): p for p in plans}
    assert by_shape[1, 1].memory_bytes == 6 * (16_000 + 8_000) + 100
    assert by_shape[4, 2].memory_bytes == 6 * (2_000 + 8_000) + 100
    fitting = encoder_plans(pipeline_parallel=4, tensor_parallel=2, memory_bytes=6 * 12_000 + 100, **MODEL)
    assert {p.num_replicas for p in fitting} == {1, 2}
    with pytest.raises(PipelinePlanError, match="the smallest needs 60100 bytes per device, there are 60099"):
        encoder_plans(pipeline_parallel=4, tensor_parallel=2, memory_bytes=60_099, **MODEL)


@pytest.mark.parametrize(("depth", "tensor"), [(1, 1), (2, 1), (4, 2), (2, 4), (1, 4)])
def test_replicas_share_no_device_and_leave_none(depth: int, tensor: int) -> None:
    """Of four ranks with four devices each, seen as columns."""
    plan = EncoderPlan(
        pipeline_parallel=depth, tensor_parallel=tensor, num_replicas=16 // depth // tensor, memory_bytes=0
    )
    replicas = place_replicas(plan, 4, 4)
    assert len(replicas) == plan.num_replicas
    assert sorted(device for replica in replicas for device in replica) == list(range(4 * (4 // tensor)))


def test_the_plan_with_the_shortest_step_is_chosen() -> None:
    """Filled coarsely; its fine step is at most as long."""
    schedule = one_forward_one_backward(4, 8)
    times = StageTimes(forward_ns=(80,) * 4, backward_ns=(160,) * 4, lead_ns=30)

    def make_encoder(plan: EncoderPlan) -> Encoder:
        depth = plan.pipeline_parallel
        segments = (80 // depth // plan.tensor_parallel // 5,) * 5
        return Encoder(
            name="vision",
            forward_ns=(segments,) * depth,
            backward_ns=(segments,) * depth,
            replicas=place_replicas(plan, 4, 2),
        )

    plans = encoder_plans(pipeline_parallel=4, tensor_parallel=2, memory_bytes=10**9, **MODEL)
    plan, coarse, fine = choose_plan(plans, make_encoder, schedule, times)
    steps = {p: fill(schedule, times, (make_encoder(p),), filling=Filling.COARSE).step_ns for p in plans}
    assert fine.step_ns <= coarse.step_ns == steps[plan] < 1.01 * min(steps.values())
    assert coarse.encoders == fine.encoders == (make_encoder(plan),)
