"""The published pipeline: what the simulator reproduces, and that it says what it does not."""

from __future__ import annotations

import pytest

from apollo_compile.distributed.pipeline.check import check_plan
from benchmarks.optimus.models import Transformer, tensor_parallel_gaps
from benchmarks.optimus.scaling import (
    BATCH,
    ENCODER,
    HARDWARE,
    LANGUAGE_MODEL,
    SIZES,
    Row,
    SizeResult,
    compare,
    simulate_size,
)


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


def test_a_collective_takes_its_bytes_over_the_bandwidth() -> None:
    """Seven eighths of 2 x 2048 x width values of two bytes at 450 GB/s; four per layer, twice as many backwards."""
    forward, backward = tensor_parallel_gaps(LANGUAGE_MODEL, BATCH, HARDWARE, tensor_parallel=8, layers=2)
    assert forward.duration_ns == backward.duration_ns == round(4096 * 12288 * 2 * 7 / 8 / 450)
    assert (forward.count, backward.count) == (8, 16)
    alone = Transformer(name="alone", width=8, num_layers=1)
    assert tensor_parallel_gaps(alone, BATCH, HARDWARE, tensor_parallel=1, layers=2)[0].count == 0


def test_plans_are_legal(results: list[SizeResult]) -> None:
    """Every bar of the largest size is looked at."""
    check_plan(results[-1].fine)


def test_balanced_steps_are_within_seven_percent(rows: dict[tuple[int, str], Row]) -> None:
    """At all three sizes, with one efficiency."""
    assert all(abs(rows[size.num_gpus, "balanced, s"].difference) <= 0.07 for size in SIZES)


def test_coarse_shares_are_within_a_point(rows: dict[tuple[int, str], Row]) -> None:
    """From one constant."""
    assert all(abs(rows[size.num_gpus, "hidden, coarse"].difference) <= 0.01 for size in SIZES)


def test_speed_up_on_most_gpus_is_reproduced_and_fine_shares_rise(rows: dict[tuple[int, str], Row]) -> None:
    """The trend of the speed-up is not reproduced, and those rows say so."""
    assert abs(rows[3072, "balanced over Optimus"].difference) <= 0.03
    shares = [rows[size.num_gpus, "hidden, fine"].computed for size in SIZES]
    coarse = [rows[size.num_gpus, "hidden, coarse"].computed for size in SIZES]
    assert shares == sorted(shares) and all(fine > rough for fine, rough in zip(shares, coarse, strict=True))
