"""Predictions follow the formula in the docstring, kernel by kernel."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from apollo_compile.cost_model.roofline import predict, predict_kernel
from apollo_compile.ir import Kernel, KernelKind, Work
from apollo_compile.target.profile import Arithmetic, Rate
from tests.profiles import CPU, CUDA

LOOPS = Work(flops=4000, bytes_read=100, bytes_written=100, kernels=2)
TWICE = Work(parts=(Kernel(flops=4000, bytes_moved=200, launches=2, count=3),))
"""A kernel that a library makes in two; its arithmetic and its bytes are not more."""
FAR = Work(parts=(Kernel(bytes_moved=1000, bytes_from_outside=1000),))


@pytest.mark.parametrize(
    ("work", "units", "options", "expected"),
    [
        (LOOPS, 1, {}, 100 + 2 * 10 + 4000 + 200),
        (LOOPS, 4, {}, 100 + 2 * 15 + 1000 + 100),
        (Work(flops=10, bytes_read=2000, bytes_written=1000, kernels=1), 2, {}, 100 + 15 + 5 + 2000),
        (Work(parts=(Kernel(kind=KernelKind.MATMUL, flops=4000, count=3),)), 1, {}, 100 + 3 * (10 + 400)),
        (Work(parts=(Kernel(kind=KernelKind.MATMUL, dtype="float64", flops=4000),)), 4, {}, 100 + 15 + 200),
        (Work(parts=(Kernel(bytes_moved=300, bytes_from_outside=100),)), 1, {}, 100 + 10 + 200 + 100),
        (Work(), 1, {}, 100),
        (Work(parts=(Kernel(count=4),)), 1, {"num_tensors": 5}, 100 + 4 * 10 + 5 * 3),
        (Work(parts=(Kernel(count=4),)), 1, {"is_first": True}, 100 + 4 * (10 + 1)),
        (TWICE, 1, {}, 100 + 3 * (2 * 10 + 4000 + 200)),
        (TWICE, 4, {"is_first": True}, 100 + 3 * (2 * (15 + 1) + 1000 + 100)),
        (FAR, 1, {"footprint": 1000}, 1110),
        (FAR, 1, {"footprint": 2000}, 2110),  # the more was touched since, the slower is what others made
        (Work(parts=(Kernel(bytes_moved=1000),)), 1, {"footprint": 2000}, 1110),
    ],
)
def test_a_duration_is_fixed_times_plus_arithmetic_plus_bytes(
    work: Work, units: int, options: dict[str, Any], expected: int
) -> None:
    """Figures done by hand; totals without kernels are taken as equal loops, and cold code and tensors cost extra."""
    assert predict(work, CPU, units, **options).duration_ns == expected


def test_shares_are_those_of_bytes_and_of_fixed_times() -> None:
    """Fixed times are those of the segment, its tensors and its kernels; nobody who uses the memory slows them."""
    assert predict(Work(parts=(Kernel(flops=290, bytes_moved=600),)), CPU, 1).memory_share == 0.6
    work = Work(parts=(Kernel(flops=300, count=2), Kernel(flops=70)))
    assert predict(work, CPU, 1).launch_share == round(130 / 800, 3)
    assert predict(work, CPU, 2, num_tensors=4, is_first=True).launch_share == round(160 / 495, 3)
    assert predict(Work(), CPU, 1)[1:] == (0.0, 1.0)
    least = predict(Work(), replace(CPU, launch_ns=0), 1)
    assert (least.duration_ns, least.memory_share) == (1, 0.0), "starts must order segments strictly"


def test_a_cpu_kernel_that_gains_nothing_from_more_cores_uses_one() -> None:
    """Starting the team takes 5 ns, which two cores do not save on 8 flops."""
    kernel = Kernel(flops=8)
    assert predict_kernel(kernel, CPU, 2) == predict_kernel(kernel, CPU, 1)
    assert predict_kernel(Kernel(flops=800), CPU, 2).total_ns < predict_kernel(Kernel(flops=800), CPU, 1).total_ns


@pytest.mark.parametrize("seed", range(20))
def test_more_cores_never_make_a_kernel_slower(seed: int) -> None:
    """Whatever the kernel, against one core."""
    rng = random.Random(seed)
    kind, flops, moved = rng.choice(list(KernelKind)), rng.randrange(10_000), rng.randrange(10_000)
    kernel = Kernel(kind=kind, flops=flops, bytes_moved=moved, bytes_from_outside=rng.randrange(moved + 1))
    alone = predict_kernel(kernel, CPU, 1).total_ns
    assert all(predict_kernel(kernel, CPU, units).total_ns <= alone for units in (2, 3, 4))


def test_a_gpu_overlaps_arithmetic_and_bytes() -> None:
    """The longer of both counts, and only a kernel that waits for bytes has a memory share."""
    computing, moving = Kernel(flops=4000, bytes_moved=100), Kernel(flops=100, bytes_moved=4000)
    assert predict_kernel(computing, CUDA, 1) == (10 + 4000, 0.0, 10.0)
    assert predict_kernel(moving, CUDA, 1) == (10 + 4000, 4000.0, 10.0)
    assert predict(TWICE, CUDA, 1).duration_ns == 100 + 3 * (2 * 10 + 4000)


@pytest.mark.parametrize(
    ("tiles", "units", "waves"), [(4, 4, 1), (5, 4, 2), (8, 4, 2), (1, 4, 1), (4, 3, 2), (6, 3, 2)]
)
def test_a_gpu_runs_tiles_in_waves(tiles: int, units: int, waves: int) -> None:
    """A wave takes what one tile takes on one unit, however few tiles the last one has."""
    flops_per_tile = 1000
    kernel = Kernel(kind=KernelKind.MATMUL, flops=tiles * flops_per_tile, tiles=tiles)
    assert predict_kernel(kernel, CUDA, units).total_ns == pytest.approx(10 + waves * flops_per_tile / 10)


def test_rates_between_sizes_follow_a_power_and_between_counts_a_line() -> None:
    """And stay as they are beyond both ends."""
    rates = (Rate(size=100, per_s=(1.0, 3.0)), Rate(size=10_000, per_s=(100.0, 300.0)))
    table = Arithmetic(kind=KernelKind.SCATTER, dtype="float32", rates=rates)
    near = (Rate(size=1, per_s=(1e9, 2e9)),)
    profile = replace(
        CPU,
        unit_counts=(1, 3),
        arithmetic=(*(replace(table, kind=kind, rates=near) for kind in (KernelKind.LOOP, KernelKind.MATMUL)), table),
        near_bytes_per_s=near,
        far_bytes_per_s=near,
    )
    flops = {1: 1.0, 100: 1.0, 1000: 10.0, 10_000: 100.0, 10**9: 100.0}
    for (size, expected), (units, factor) in itertools.product(flops.items(), ((1, 1), (2, 2), (9, 3))):
        assert profile.flops_per_s(KernelKind.SCATTER, "float32", size, units) == pytest.approx(factor * expected)
    assert profile.flops_per_s(KernelKind.LIBRARY, "int64", 100, 1) == pytest.approx(1.0)
    assert profile.flops_per_s(KernelKind.CONVOLUTION_BACKWARD, "bfloat16", 100, 1) == pytest.approx(1e9)
