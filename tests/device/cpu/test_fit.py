from __future__ import annotations

import pytest

from apollo_compile.device.cpu.fit import fit_profile
from apollo_compile.device.cpu.probes import Probe, Sample
from apollo_compile.device.cpu.runtime import RuntimeTimes
from apollo_compile.ir import KernelKind

COUNTS = (1, 2)
RUNTIME = RuntimeTimes(
    kernel_ns=100, cold_ns=7, launch_ns=8, tensor_ns=9, handover_ns=10, slowdown=((1.0, 1.1), (1.2, 1.3))
)


def sample(*work_ns: float, kind: KernelKind = KernelKind.LOOP, **work: object) -> Sample:
    """Return a probe that takes so long by number of units, beyond a kernel's fixed time."""
    probe = Probe(kind=kind, call=lambda: None, **work)  # type: ignore[arg-type]
    return Sample(probe=probe, times={count: 100 + ns for count, ns in zip(COUNTS, work_ns, strict=True)})


NEAR = sample(1000, 500, near_bytes=10_000)
FAR = sample(1000 + 4000, 500 + 2000, near_bytes=5_000, far_bytes=5_000, footprint=2**20)
PRODUCT = sample(1000 + 3000, 500 + 1500, kind=KernelKind.MATMUL, flops=60_000, near_bytes=10_000)
LOOP = sample(1100, 500, flops=1_000, is_parallel=True)
"""Two units take half the time, that of a kernel included."""


def test_rates_are_those_of_the_work_that_fixed_times_leave() -> None:
    """Bytes per second of near vectors first; what far vectors and arithmetic take comes on top of these."""
    profile = fit_profile(2, COUNTS, [NEAR, FAR, PRODUCT, LOOP], RUNTIME)
    assert [(rate.size, rate.per_s) for rate in profile.near_bytes_per_s] == [(10_000, (1e10, 2e10))]
    (far,) = profile.far_bytes_per_s
    assert (far.size, far.per_s) == (2**20, pytest.approx((5_000 / 4500e-9, 5_000 / 2250e-9), rel=1e-3))
    product, loop = profile.arithmetic
    assert (product.kind, product.rates[0].per_s) == (KernelKind.MATMUL, (2e10, 4e10))
    assert (loop.kind, profile.parallel_ns) == (KernelKind.LOOP, 0)
    assert (profile.kernel_ns, profile.cold_ns, profile.launch_ns) == (100, 7, 8)
    assert (profile.tensor_ns, profile.handover_ns, profile.slowdown) == (9, 10, RUNTIME.slowdown)


def test_what_several_units_take_beyond_their_share_is_the_start_of_a_team() -> None:
    """It is no part of a rate."""
    loop = sample(1100, 750, flops=1_000, is_parallel=True)
    near = sample(1000, 750, near_bytes=10_000)
    profile = fit_profile(2, COUNTS, [near, FAR, PRODUCT, loop], RUNTIME)
    assert profile.parallel_ns == 850 - 1200 / 2
    assert profile.near_bytes_per_s[0].per_s == (1e10, 2e10)


def test_a_call_that_is_shorter_than_its_fixed_times_still_has_a_rate() -> None:
    """A tenth of its time is work at least."""
    probe = Probe(kind=KernelKind.LOOP, near_bytes=1_000, call=lambda: None)
    near = Sample(probe=probe, times={1: 50.0})
    profile = fit_profile(1, (1,), [near, FAR, PRODUCT, LOOP], RUNTIME)
    assert profile.near_bytes_per_s[0].per_s == (1_000 / 5e-9,)
    assert profile.parallel_ns == 0
