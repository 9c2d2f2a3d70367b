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
once, and the median over the rounds counts, as predictions are about median steps. A round is disturbed by another
process if this process got less CPU time than its threads can use; `Calibration` has the share of such rounds.

All OpenMP regions run on the calling thread: a second thread team permanently slows both down.

This file is the procedure; `probes.py` has the kernels, `runtime.py` the runtime and neighbours, `fit.py` the rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from apollo_compile.device.cpu.discover import LEAST_CPU_SHARE
from apollo_compile.device.cpu.execute import keep_memory, most_units
from apollo_compile.device.cpu.fit import fit_profile
from apollo_compile.device.cpu.probes import TimedProbe, make_probes
from apollo_compile.device.cpu.runtime import RuntimePrograms
from apollo_compile.target.lanes import lane_catalogue, useful_lanes
from apollo_compile.target.profile import DeviceProfile

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the phase, the number of steps done, and the number of steps."""

ROUNDS = 100
"""Number of rounds; each measures everything once."""

_CHECK_SIDE = 512
"""Rows and columns of the matmul that checks for other processes; it uses every core."""

_MOST_DISTURBED = 0.5
"""Share of disturbed rounds above which a profile is not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A measured profile."""

    profile: DeviceProfile
    disturbed_share: float
    """Share of the rounds, or of the neighbour runs, in which other processes occupied a core."""

    @property
    def is_disturbed(self) -> bool:
        """Whether too many rounds were disturbed to keep the profile."""
        return self.disturbed_share > _MOST_DISTURBED


def calibrate(units: int, *, rounds: int = ROUNDS, progress: Progress = lambda what, done, total: None) -> Calibration:
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
    threads = torch.get_num_threads()
    steps = _Steps(progress, total=rounds + 2)
    steps.begin("compiling test segments")
    counts = _unit_counts(units)
    runtime = RuntimePrograms(units, counts)
    probes = [TimedProbe(probe, counts) for probe in make_probes()]
    disturbed = 0
    with torch.no_grad():
        for number in range(rounds):
            steps.begin("measuring")
            runtime.run()
            for count in counts:
                torch.set_num_threads(count)
                disturbed += _cpu_share() < LEAST_CPU_SHARE * count
                for probe in probes:
                    probe.time(number, count)
            torch.set_num_threads(threads)
    steps.begin("done")
    times = runtime.fixed_times()
    samples = [*(probe.sample() for probe in probes), *runtime.samples(times)]
    return Calibration(
        profile=fit_profile(units, counts, samples, times),
        disturbed_share=max(disturbed / (rounds * len(counts)), runtime.disturbed_share()),
    )


def _unit_counts(units: int) -> list[int]:
    """Return the numbers of units to measure; rates between them are interpolated."""
    return sorted({1, *(len(lane.units) for lane in useful_lanes(lane_catalogue(units), 2))})


class _Steps:
    """Counts steps for the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def begin(self, what: str) -> None:
        self._progress(what, self._done, self._total)
        self._done += 1


def _cpu_share() -> float:
    """Return CPU time over wall time of large matmuls: the number of torch's threads, if all cores are free."""
    values = torch.ones(_CHECK_SIDE, _CHECK_SIDE)
    total = torch.mm(values, values)
    begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(2):
        torch.mm(values, values, out=total)
    return (time.process_time_ns() - cpu_begin) / (time.perf_counter_ns() - begin)
