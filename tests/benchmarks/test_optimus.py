"""The published pipeline: the simulated figures that are reproduced, the division of layers, the encoder's plans."""

from __future__ import annotations

import itertools
import random

import pytest

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.values import Encoder, Filling, StageTimes
from apollo_compile.errors import PipelinePlanError
from benchmarks.optimus.scaling import (
    ENCODER,
    LANGUAGE_MODEL,
    SIZES,
    Row,
    SizeResult,
    compare,
    simulate_size,
)
from benchmarks.optimus.search import (
    EncoderPlan,
    balance_layers,
    choose_plan,
    encoder_plans,
    place_replicas,
    sum_stages,
)
from tests.distributed_plan.pipeline.legal import check_plan

MODEL = {"pipeline_parameters": 64_000, "encoder_parameters": 16_000, "activation_bytes": 100}


@pytest.fixture(scope="module")
def results() -> list[SizeResult]:
    """All three sizes; the encoder's parallel plan is the one that coarse filling prefers."""
    return [simulate_size(size) for size in SIZES]


@pytest.fixture(scope="module")
def rows(results: list[SizeResult]) -> dict[tuple[int, str], Row]:
    """Rows by size and name."""
    return {(row.num_gpus, row.name): row for row in compare(results)}


def test_shapes_have_the_published_size() -> None:
    """22 and 175 billion parameters, and 829 TFLOP per sample less the vocabulary's three."""
    assert ENCODER.parameters / 1e9 == pytest.approx(22, rel=0.02)
    assert LANGUAGE_MODEL.parameters / 1e9 == pytest.approx(175, rel=0.01)
    flops = sum(model.num_layers * model.layer_flops(2048, 2048) for model in (ENCODER, LANGUAGE_MODEL))
    assert flops / 1e12 == pytest.approx(829, rel=0.005)


def test_plans_are_legal(results: list[SizeResult]) -> None:
    """Every bar of the largest size is looked at."""
    check_plan(results[-1].fine)


def test_published_figures_are_reproduced_as_far_as_the_docs_say(rows: dict[tuple[int, str], Row]) -> None:
    """With one efficiency and one constant; the trend of the speed-up is not, and those rows say so."""
    for size in SIZES:
        assert rows[size.num_gpus, "balanced, s"].is_within and rows[size.num_gpus, "hidden, coarse"].is_within
    assert rows[3072, "balanced over Optimus"].is_within and sum(row.is_within for row in rows.values()) == 10
    coarse, fine = ([rows[size.num_gpus, f"hidden, {kind}"].computed for size in SIZES] for kind in ("coarse", "fine"))
    assert fine == sorted(fine) and all(more > less for more, less in zip(fine, coarse, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_the_most_expensive_stage_is_as_cheap_as_possible(seed: int) -> None:
    """Of all divisions into contiguous stages."""
    rng = random.Random(seed)
    costs = [rng.randint(0, 20) for _ in range(rng.randint(1, 9))]
    num_stages = rng.randint(1, len(costs))
    counts = balance_layers(costs, num_stages)
    assert len(counts) == num_stages and sum(counts) == len(costs) and min(counts) >= 1
    ways = itertools.combinations(range(1, len(costs)), num_stages - 1)
    best = min(max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(costs)))) for cuts in ways)
    assert max(sum_stages(costs, counts)) == best
    assert sum(sum_stages(costs, counts)) == sum(costs)


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
