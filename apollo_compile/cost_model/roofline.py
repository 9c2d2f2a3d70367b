"""Predicted duration of a segment: the sum of a roofline per kernel and of fixed times.

    predict(work, profile, units, ...) -> (duration_ns, memory_share, launch_share)

    duration     launch + tensor * (inputs + outputs) + sum of kernels
    kernel       launches * (kernel + parallel if units > 1 + cold if the body runs for the first time)
                 + arithmetic (+) memory
    arithmetic   flops / rate(kind, dtype, flops, units) / efficiency of the waves
    memory       near bytes / near rate(bytes of the kernel, units) + far bytes / far rate(footprint, units)
    (+)          the larger of the two on CUDA, where other warps compute while some wait for memory; the sum on a CPU

The rates were measured with exactly `units` units busy, so they include poor scaling; they do not include interference
from other lanes. Far bytes are read from buffers of earlier segments: in a step these are weights and activations that
were written long ago. Their cache level depends on how much memory was touched since, so their rate is a function of
the footprint of the program, the bytes of all its buffers.

A CUDA device assigns the output tiles of a GEMM to its units in waves, so with `t` tiles on `u` units the last wave may
leave most of them idle:

    waves = ceil(t / u)     efficiency = t / (waves * u)

A CPU library uses fewer threads where more would not help, so a kernel is never predicted to be slower on several units
than on one.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from apollo_compile.ir import Kernel, Work
from apollo_compile.units import NS_PER_S

if TYPE_CHECKING:
    from apollo_compile.target.profile import DeviceProfile


class SegmentTime(NamedTuple):
    """Predicted duration of a segment, and its shares."""

    duration_ns: int
    """Duration, at least 1."""
    memory_share: float
    """Share of the duration spent waiting for memory, 0 to 1."""
    launch_share: float
    """Share of the duration that is fixed: launching the segment and its kernels, 0 to 1."""


class KernelTime(NamedTuple):
    """Predicted duration of one kernel."""

    total_ns: float
    memory_ns: float
    """Part of the total that is spent on bytes."""
    fixed_ns: float
    """Part of the total that does not depend on the size of the kernel."""


def predict(
    work: Work, profile: DeviceProfile, units: int, *, num_tensors: int = 0, footprint: int = 0, is_first: bool = False
) -> SegmentTime:
    """Return the expected duration of `work` on `units` units, and the shares of memory and launches.

    Arguments:
        work: work of one segment.
        profile: profile of the device.
        units: units of the lane that runs the segment.
        num_tensors: number of inputs and outputs of its body.
        footprint: bytes of all buffers of the program.
        is_first: whether no earlier segment of the program has its body.
    """
    total_ns, memory_ns = float(profile.launch_ns + profile.tensor_ns * num_tensors), 0.0
    fixed_ns = total_ns
    cold_ns = profile.cold_ns if is_first else 0
    for kernel in _kernels(work):
        time = predict_kernel(kernel, profile, units, footprint=footprint)
        total_ns += kernel.count * (time.total_ns + kernel.launches * cold_ns)
        memory_ns += kernel.count * time.memory_ns
        fixed_ns += kernel.count * (time.fixed_ns + kernel.launches * cold_ns)
    if not total_ns:
        return SegmentTime(1, 0.0, 0.0)
    return SegmentTime(max(1, round(total_ns)), round(memory_ns / total_ns, 3), round(fixed_ns / total_ns, 3))


def predict_kernel(kernel: Kernel, profile: DeviceProfile, units: int, *, footprint: int = 0) -> KernelTime:
    """Return the expected time of one `kernel`, without the launch of its segment; `kernel.count` is ignored."""
    if profile.overlap == "max":
        return _overlapped(kernel, profile, units, footprint)
    alone = _serialized(kernel, profile, 1, footprint)
    return alone if units == 1 else min(alone, _serialized(kernel, profile, units, footprint))


def _overlapped(kernel: Kernel, profile: DeviceProfile, units: int, footprint: int) -> KernelTime:
    arithmetic_ns = _arithmetic_ns(kernel, profile, units) / wave_efficiency(kernel.tiles, units)
    memory_ns = _memory_ns(kernel, profile, units, footprint)
    longer_ns = max(arithmetic_ns, memory_ns)
    fixed_ns = kernel.launches * float(profile.kernel_ns)
    return KernelTime(fixed_ns + longer_ns, longer_ns if memory_ns > arithmetic_ns else 0.0, fixed_ns)


def _serialized(kernel: Kernel, profile: DeviceProfile, units: int, footprint: int) -> KernelTime:
    memory_ns = _memory_ns(kernel, profile, units, footprint)
    fixed_ns = kernel.launches * float(profile.kernel_ns + (profile.parallel_ns if units > 1 else 0))
    return KernelTime(fixed_ns + _arithmetic_ns(kernel, profile, units) + memory_ns, memory_ns, fixed_ns)


def _arithmetic_ns(kernel: Kernel, profile: DeviceProfile, units: int) -> float:
    return kernel.flops / profile.flops_per_s(kernel.kind, kernel.dtype, kernel.flops, units) * NS_PER_S


def _memory_ns(kernel: Kernel, profile: DeviceProfile, units: int, footprint: int) -> float:
    near_bytes = kernel.bytes_moved - kernel.bytes_from_outside
    near_s = near_bytes / profile.near_rate(kernel.bytes_moved, units)
    return (near_s + kernel.bytes_from_outside / profile.far_rate(footprint, units)) * NS_PER_S


def wave_efficiency(tiles: int, units: int) -> float:
    """Return the mean share of units that are busy while `tiles` run in waves of one tile per unit."""
    return tiles / (-(-tiles // units) * units) if tiles else 1.0


def _kernels(work: Work) -> tuple[Kernel, ...]:
    """Return the kernels of `work`; if only the totals are known, equal loops that add up to them."""
    if work.parts or work == Work():
        return work.parts
    count = max(work.kernels, 1)
    return (
        Kernel(flops=work.flops // count, bytes_moved=(work.bytes_read + work.bytes_written) // count, count=count),
    )
