"""Cells: the split of layers against all splits, and how a step changes with devices, links and memory."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from apollo_compile.cost_model.cells import COPIES, Cell, Device, Layer, ModelTimes, cells_of, split_layers
from apollo_compile.cost_model.collectives import Link

LAYER = Layer(
    name="layer",
    forward_s=0.01,
    backward_s=0.02,
    divisible=0.9,
    products=4,
    weight_bytes=2**20,
    frozen_bytes=0,
    activation_bytes=2**20,
    saved_bytes=2**22,
    cut_bytes=2**20,
)
FAST = Link(1e-6, 1e12)
GPU = Device(
    name="gpu",
    error=0.5,
    memory_bytes=None,
    per_node=4,
    link=FAST,
    node_link=FAST,
    link_error=0.5,
    hides_gradients=True,
    update_bytes_per_s=1e12,
)


def times(samples: int) -> ModelTimes:
    """Return a model of eight equal layers, whose time is proportional to the samples."""
    layer = replace(LAYER, forward_s=0.01 * samples / 32, backward_s=0.02 * samples / 32)
    return ModelTimes(layers=(layer,) * 8, memory_share=0.2, launch_share=0.1, workspace_bytes=100)


def only(cells: list[Cell], stages: int) -> Cell:
    """Return the Cell with this number of stages."""
    return next(cell for cell in cells if cell.stages == stages)


@pytest.mark.parametrize("seed", range(10))
def test_layers_are_split_as_well_as_by_trying_all_splits(seed: int) -> None:
    """Seven layers into one to five stages."""
    rng = random.Random(seed)
    layers = [replace(LAYER, forward_s=rng.random(), backward_s=rng.random()) for _ in range(7)]
    seconds = [layer.forward_s + layer.backward_s for layer in layers]
    for stages in range(1, 6):
        parts = list(split_layers(layers, stages))
        assert [layer for part in parts for layer in part] == layers and all(parts)
        best = min(
            max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, 7)))
            for cuts in itertools.combinations(range(1, 7), stages - 1)
        )
        assert max(sum(_.forward_s + _.backward_s for _ in part) for part in parts) == pytest.approx(best)


def test_devices_divide_samples_layers_and_tensors() -> None:
    """Eight layers of 30 ms; four copies of 8 MiB and what the forward keeps."""
    (one,) = cells_of(times, GPU, 1, 32)
    assert one.step_s == pytest.approx(0.24 + 7 * 8 * 2**20 / 1e12)
    assert one.memory_bytes == 8 * (COPIES * 2**20 + 2**22) + 100
    assert (one.data, one.tensor, one.stages, one.bound) == (1, 1, 1, "arithmetic")
    assert (one.low_s, one.high_s) == pytest.approx((0.5 * one.step_s, 1.5 * one.step_s))
    parallel, pipeline = (only(cells_of(times, GPU, 2, 32), stages) for stages in (1, 2))
    assert (parallel.data, parallel.tensor) == (2, 1)
    assert one.step_s / 2 < parallel.step_s < 0.51 * one.step_s, "the backward hides all gradients but the last bucket"
    assert (pipeline.data, pipeline.tensor, pipeline.microbatches) == (1, 1, 8)
    assert pipeline.step_s == pytest.approx(0.24 / 2 * 9 / 8, rel=0.01)
    ((sample,), (divided,)) = (cells_of(times, GPU, count, 1) for count in (1, 2))
    assert (divided.data, divided.tensor) == (1, 2), "a batch of one"
    assert divided.step_s == pytest.approx(sample.step_s * 0.55, rel=0.2), "nine tenths by two, and sums"


def test_a_slow_link_bounds_the_step() -> None:
    """8 MiB at 10 MB/s take longest; cores of a CPU do not hide them, and every bucket has a latency."""
    slow = replace(GPU, link=Link(1e-6, 1e7), node_link=Link(1e-6, 1e7), hides_gradients=False)
    cell = only(cells_of(times, slow, 2, 32), 1)
    assert cell.bound == "gradient sums" and cell.step_s > 8 * 2**20 / 1e7
    late = replace(slow, link=Link(1e-3, 1e7), node_link=Link(1e-3, 1e7))
    waits = 8 * 2  # eight buckets of a megabyte, each twice around the ring
    assert only(cells_of(times, late, 2, 32), 1).step_s - cell.step_s == pytest.approx(waits * (1e-3 - 1e-6))


def test_tensors_are_not_divided_over_nodes() -> None:
    """Where eight devices are two nodes, a batch of one has no Cell without a pipeline."""
    assert all(cell.tensor <= 4 for cell in cells_of(times, GPU, 8, 32))
    assert not cells_of(times, GPU, 8, 1)


def test_tensor_parallelism_has_the_limit_that_is_asked_for() -> None:
    """Only divided layers fit; with a limit of one device, two replicas that do not fit are all there is."""
    link = Link(1e-6, 1e6)
    few = replace(GPU, link=link, node_link=link, memory_bytes=8 * (COPIES * 2**20 + 2**21))
    for limit, expected in ((None, (1, 2, True)), (2, (1, 2, True)), (1, (2, 1, False))):
        cell = only(cells_of(times, few, 2, 2, limit), 1)
        assert (cell.data, cell.tensor, cell.fits) == expected
    assert not [cell for cell in cells_of(times, few, 2, 1, 1) if cell.stages == 1]


def test_a_cell_that_does_not_fit_is_only_taken_if_no_split_fits() -> None:
    """Data parallelism is faster, and a replica needs more memory than half of one."""
    tight = replace(GPU, link=Link(1e-6, 1e10), memory_bytes=8 * (COPIES * 2**20 + 2**21))
    cell = only(cells_of(times, replace(tight, memory_bytes=None), 2, 32), 1)
    assert (cell.data, cell.tensor, cell.fits) == (2, 1, True)
    cell = only(cells_of(times, tight, 2, 32), 1)
    assert (cell.data, cell.tensor, cell.fits) == (1, 2, True)
    assert not only(cells_of(times, replace(tight, memory_bytes=1), 2, 32), 1).fits
