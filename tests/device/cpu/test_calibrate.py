"""A calibration gives a usable profile of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apollo_compile.cost_model.roofline import predict
from apollo_compile.device.cpu import probes
from apollo_compile.device.cpu.calibrate import calibrate, fit_profile
from apollo_compile.device.cpu.execute import available_units
from apollo_compile.device.cpu.matmul_libraries import LEAST_FLOPS
from apollo_compile.device.cpu.probes import Probe
from apollo_compile.device.cpu.runtime import RuntimeTimes
from apollo_compile.ir import KernelKind, Work
from apollo_compile.target.lanes import lane_catalogue
from tests.torch_settings import threads


@pytest.mark.slow
@pytest.mark.parametrize("units", (1, 2))
def test_a_calibration_measures_everything(units: int) -> None:
    """Every kind of kernel and every number of units; progress ends at its total, and torch keeps its threads."""
    if available_units() < units:
        pytest.skip("torch can use one core")
    num_threads, steps = torch.get_num_threads(), []
    result = calibrate(units, rounds=3, progress=lambda what, done, total: steps.append((what, done, total)))
    profile = result.profile
    assert (profile.kind, profile.source, profile.units) == ("cpu", "measured", units)
    assert {table.kind for table in profile.arithmetic} == set(KernelKind)
    assert {table.dtype for table in profile.arithmetic} == {"float32", "float64", "float16", "bfloat16"}
    assert {len(lane.units) for lane in lane_catalogue(units)} <= set(profile.unit_counts)
    assert profile.kernel_ns > 0 and (profile.handover_ns > 0) == (units > 1)
    assert predict(Work(flops=10**6, kernels=1), profile, units).duration_ns > 1
    assert torch.get_num_threads() == num_threads
    assert list(dict.fromkeys(what for what, *_ in steps)) == ["compiling test segments", "measuring", "done"]
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert steps[-1][1] + 1 == steps[-1][2]
    assert 0 <= result.disturbed_share <= 1


@pytest.mark.parametrize("units", (0, 10_000))
def test_units_that_torch_does_not_use_are_refused(units: int) -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match=f"cannot calibrate {units} units"):
        calibrate(units)


def test_matmuls_are_timed_as_bodies_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of units has calls of its own, in float32, at the sizes for which bodies have a choice."""
    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(probes, "call_as_bodies", lambda size, cores: lambda: timed.append((size, cores)))
    kind = (KernelKind.MATMUL, "float32")
    for matmul in (each for each in probes.make_probes((1, 2)) if (each.kind, each.dtype) == kind):
        for units in (1, 2):
            timed.clear()
            with threads(units):
                matmul.time(0, units)
            found = {(2 * size**3, cores) for size, cores in timed}
            assert found == ({(matmul.flops, units)} if matmul.flops >= LEAST_FLOPS else set())
            assert len(matmul.times[units]) == 1


COUNTS = (1, 2)
RUNTIME = RuntimeTimes(
    kernel_ns=100, cold_ns=7, launch_ns=8, tensor_ns=9, handover_ns=10, slowdown=((1.0, 1.1), (1.2, 1.3))
)


def probe(*work_ns: float, kind: KernelKind = KernelKind.LOOP, **work: Any) -> Probe:
    """Return a probe that takes so long by number of units, beyond a kernel's fixed time."""
    return Probe(kind=kind, times={count: [100 + ns] for count, ns in zip(COUNTS, work_ns, strict=True)}, **work)


NEAR = probe(1000, 500, near_bytes=10_000)
FAR = probe(1000 + 4000, 500 + 2000, near_bytes=5_000, far_bytes=5_000, footprint=2**20)
MATMUL = probe(1000 + 3000, 500 + 1500, kind=KernelKind.MATMUL, flops=60_000, near_bytes=10_000)
LOOP = probe(1100, 500, flops=1_000, is_parallel=True)
"""Two units take half the time, that of a kernel included."""


def test_rates_are_those_of_the_work_that_fixed_times_leave() -> None:
    """Bytes per second of near vectors first; far vectors and arithmetic take their time on top of these."""
    profile = fit_profile(2, COUNTS, [NEAR, FAR, MATMUL, LOOP], RUNTIME)
    assert [(rate.size, rate.per_s) for rate in profile.near_bytes_per_s] == [(10_000, (1e10, 2e10))]
    (far,) = profile.far_bytes_per_s
    assert (far.size, far.per_s) == (2**20, pytest.approx((5_000 / 4500e-9, 5_000 / 2250e-9), rel=1e-3))
    matmul, loop = profile.arithmetic
    assert (matmul.kind, matmul.rates[0].per_s) == (KernelKind.MATMUL, (2e10, 4e10))
    assert (loop.kind, profile.parallel_ns) == (KernelKind.LOOP, 0)
    assert (profile.kernel_ns, profile.cold_ns, profile.launch_ns) == (100, 7, 8)
    assert (profile.tensor_ns, profile.handover_ns, profile.slowdown) == (9, 10, RUNTIME.slowdown)


def test_the_time_of_several_units_beyond_their_share_is_the_start_of_a_team() -> None:
    """It is no part of a rate."""
    near, loop = probe(1000, 750, near_bytes=10_000), probe(1100, 750, flops=1_000, is_parallel=True)
    profile = fit_profile(2, COUNTS, [near, FAR, MATMUL, loop], RUNTIME)
    assert profile.parallel_ns == 850 - 1200 / 2
    assert profile.near_bytes_per_s[0].per_s == (1e10, 2e10)


def test_a_call_that_is_shorter_than_its_fixed_times_still_has_a_rate() -> None:
    """A tenth of its time is work at least."""
    near = Probe(kind=KernelKind.LOOP, near_bytes=1_000, times={1: [50.0]})
    profile = fit_profile(1, (1,), [near, FAR, MATMUL, LOOP], RUNTIME)
    assert profile.near_bytes_per_s[0].per_s == (1_000 / 5e-9,) and profile.parallel_ns == 0
