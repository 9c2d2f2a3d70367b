"""Fit the rates of a DeviceProfile, so that the roofline reproduces the measured times.

A rate is fitted to the time of a call that remains after fixed times and memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from apollo_compile.device.cpu.machine import cpu_model
from apollo_compile.device.cpu.probes import Probe, Sample
from apollo_compile.device.cpu.runtime import RuntimeTimes
from apollo_compile.ir import KernelKind
from apollo_compile.target.profile import Arithmetic, DeviceProfile, Rate, rate_at
from apollo_compile.units import NS_PER_S

_LEAST_SHARE = 0.1
"""Least share of a call's time that is attributed to its work."""


def fit_profile(units: int, counts: Sequence[int], samples: Sequence[Sample], runtime: RuntimeTimes) -> DeviceProfile:
    """Return the profile whose roofline reproduces the measured times."""
    waits = [sample.times[units] - sample.times[1] / units for sample in samples if sample.probe.is_parallel]
    parallel_ns = max(0.0, min(waits)) if units > 1 else 0.0

    def rate(sample: Sample, amount: int, size: int, other_ns: Callable[[int], float]) -> Rate:
        """Return the rate of `amount` in the time that remains after fixed times and `other_ns(units)`."""
        per_s = []
        for count in counts:
            fixed_ns = runtime.kernel_ns + (parallel_ns if count > 1 else 0.0) + other_ns(count)
            rest_ns = max(sample.times[count] - fixed_ns, _LEAST_SHARE * sample.times[count])
            per_s.append(float(f"{amount / rest_ns * NS_PER_S:.4g}"))
        return Rate(size=size, per_s=tuple(per_s))

    near: list[Rate] = []

    def near_ns(probe: Probe) -> Callable[[int], float]:
        return lambda count: probe.near_bytes / rate_at(near, counts, probe.bytes_moved, count) * NS_PER_S

    far: list[Rate] = []
    arithmetic: dict[tuple[KernelKind, str], list[Rate]] = defaultdict(list)
    for sample in samples:  # near-byte samples come first: the other rates depend on them
        probe = sample.probe
        if probe.flops:
            table = arithmetic[probe.kind, probe.dtype]
            table.append(rate(sample, probe.flops, probe.flops, near_ns(probe)))
        elif probe.far_bytes:
            far.append(rate(sample, probe.far_bytes, probe.footprint, near_ns(probe)))
        elif probe.near_bytes:
            near.append(rate(sample, probe.near_bytes, probe.bytes_moved, lambda count: 0.0))
    return DeviceProfile(
        kind="cpu",
        name=f"{cpu_model()} x{units}",
        source="measured",
        units=units,
        unit_counts=tuple(counts),
        arithmetic=tuple(
            Arithmetic(kind=kind, dtype=dtype, rates=tuple(rates)) for (kind, dtype), rates in arithmetic.items()
        ),
        near_bytes_per_s=tuple(near),
        far_bytes_per_s=tuple(far),
        kernel_ns=round(runtime.kernel_ns),
        parallel_ns=round(parallel_ns),
        cold_ns=round(runtime.cold_ns),
        launch_ns=round(runtime.launch_ns),
        tensor_ns=round(runtime.tensor_ns),
        handover_ns=round(runtime.handover_ns),
        slowdown=runtime.slowdown,
    )
