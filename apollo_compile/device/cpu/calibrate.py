"""Calibration: measure this machine with microbenchmarks, and fit a DeviceProfile.

    calibrate(units, progress=...) -> Calibration (the profile, and whether other processes disturbed the measurement)

Three things are measured, for one unit, for all units and for every number of units in the lane catalogue:

runtime     Bodies compiled by Inductor, run by the native runtime as segments are: the cost of calling a body, of each
            tensor, and of a kernel whose code is in no cache; the speed of a fused loop; and the time of a hand-over
            between lanes.
kernels     Torch kernels that segments consist of, small to large: matmuls, attention, convolutions, loops over
            vectors that are in the cache (near) or not (far), scatters. A rate is fitted to the time that remains
            after fixed times and memory, so that the roofline reproduces the measured time.
neighbours  The runtime with one half of the units computing matmuls or copying memory, while the other half does
            either.

On a shared machine the same code may take twice as long from one moment to the next. So each round measures everything
once. For kernels, the mean over the rounds without the fastest and the slowest twentieth counts: a step is the sum of
hundreds of kernels, so it follows their means. For fixed costs, the median counts. A round is disturbed by another
process if this process got less CPU time than its threads can use; `Calibration` has the share of such rounds.

All OpenMP regions run on the calling thread: a second thread team permanently slows both down.

This file is the procedure and the fit; `probes.py` has the kernels, `runtime.py` the runtime and neighbours.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from apollo_compile.device.cpu.discover import LEAST_CPU_SHARE
from apollo_compile.device.cpu.execute import keep_memory, most_units
from apollo_compile.device.cpu.machine import cpu_model
from apollo_compile.device.cpu.probes import Probe, make_probes
from apollo_compile.device.cpu.runtime import RuntimePrograms, RuntimeTimes
from apollo_compile.ir import KernelKind
from apollo_compile.target.lanes import lane_catalogue, lanes_for_two
from apollo_compile.target.profile import Arithmetic, DeviceProfile, Rate, rate_at
from apollo_compile.units import NS_PER_S

ReportStep: TypeAlias = Callable[[str, int, int], None]
"""Called with the phase, the number of steps done, and the number of steps."""

ROUNDS = 100
"""Number of rounds; each measures everything once."""

_CHECK_SIDE = 512
"""Rows and columns of the matmul that checks for other processes; it uses every core."""

_MOST_DISTURBED = 0.5
"""Share of disturbed rounds above which a profile is not kept."""

_LEAST_SHARE = 0.1
"""Least share of a call's time that is attributed to its work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A measured profile."""

    profile: DeviceProfile
    disturbed_share: float
    """Share of the rounds in which other processes occupied a core."""

    @property
    def is_disturbed(self) -> bool:
        """Whether too many rounds were disturbed to keep the profile."""
        return self.disturbed_share > _MOST_DISTURBED


def calibrate(
    units: int, *, rounds: int = ROUNDS, progress: ReportStep = lambda what, done, total: None
) -> Calibration:
    """Measure this machine with `units` units, in less than two minutes; no other work should run.

    Arguments:
        units: number of cores to use.
        rounds: number of rounds; with fewer than the default, a short disturbance affects the profile.
        progress: called before every step.

    Raises:
        ValueError: torch has fewer threads, or the process fewer cores, than `units`.
    """
    if not 1 <= units <= most_units():
        raise ValueError(
            f"cannot calibrate {units} units: choose 1 to {most_units()}, the number of cores that torch can use here"
        )
    keep_memory()
    progress("compiling test segments", 0, rounds + 2)
    threads, disturbed = torch.get_num_threads(), 0
    # Rates between these numbers of units are interpolated.
    counts = sorted({1, *(len(lane.units) for lane in lanes_for_two(lane_catalogue(units)))})
    runtime, probes = RuntimePrograms(units, counts), make_probes(counts)
    with torch.no_grad():
        for number in range(rounds):
            progress("measuring", number + 1, rounds + 2)
            runtime.run()
            for count in counts:
                torch.set_num_threads(count)
                disturbed += _cpu_share() < LEAST_CPU_SHARE * count
                for probe in probes:
                    probe.time(number, count)
            torch.set_num_threads(threads)
    progress("done", rounds + 1, rounds + 2)
    times = runtime.fixed_times()
    return Calibration(
        profile=fit_profile(units, counts, [*probes, *runtime.loops(times)], times),
        disturbed_share=disturbed / (rounds * len(counts)),
    )


def _cpu_share() -> float:
    """Return CPU time over wall time of large matmuls: the number of torch's threads, if all cores are free."""
    values = torch.ones(_CHECK_SIDE, _CHECK_SIDE)
    total = torch.mm(values, values)
    begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(2):
        torch.mm(values, values, out=total)
    return (time.process_time_ns() - cpu_begin) / (time.perf_counter_ns() - begin)


def fit_profile(units: int, counts: Sequence[int], probes: Sequence[Probe], runtime: RuntimeTimes) -> DeviceProfile:
    """Return the profile whose roofline reproduces the measured times of kernels, near vectors first."""
    waits = [probe.ns(units) - probe.ns(1) / units for probe in probes if probe.is_parallel]
    parallel_ns = max(0.0, min(waits)) if units > 1 else 0.0

    def rate(probe: Probe, amount: int, size: int, near_bytes: int) -> Rate:
        """Return the rate of `amount` in the time that remains after fixed times and near bytes."""
        per_s = []
        for count in counts:
            fixed_ns = runtime.kernel_ns + (parallel_ns if count > 1 else 0.0)
            if near_bytes:
                fixed_ns += near_bytes / rate_at(near, counts, probe.bytes_moved, count) * NS_PER_S
            rest_ns = max(probe.ns(count) - fixed_ns, _LEAST_SHARE * probe.ns(count))
            per_s.append(float(f"{amount / rest_ns * NS_PER_S:.4g}"))
        return Rate(size=size, per_s=tuple(per_s))

    near: list[Rate] = []
    far: list[Rate] = []
    arithmetic: dict[tuple[KernelKind, str], list[Rate]] = defaultdict(list)
    for probe in probes:
        if probe.flops:
            arithmetic[probe.kind, probe.dtype].append(rate(probe, probe.flops, probe.flops, probe.near_bytes))
        elif probe.far_bytes:
            far.append(rate(probe, probe.far_bytes, probe.footprint, probe.near_bytes))
        else:
            near.append(rate(probe, probe.near_bytes, probe.bytes_moved, 0))
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
