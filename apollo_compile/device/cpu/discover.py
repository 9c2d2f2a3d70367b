"""Find the profile of this machine: the calibrated profile if it exists, else the packaged profile, scaled.

    discover_profile(units, cache_dir=...) -> DeviceProfile

Each of several ranks has a share of the cores, for which nobody calibrates. So the calibrated profile of more cores of
the machine serves fewer of them, too.

Without a calibrated profile, a quick measurement on one thread (matmuls by BLAS and as in bodies, a vector addition,
about 0.1 s) scales the packaged profile, and the result is cached. It uses one thread, because a second OpenMP thread
team slows every later parallel region. Another process on the core makes the device look slow, so a round counts as
disturbed if the thread got less CPU time than it could use; a disturbed result is used, but not cached.

For a file that is damaged, or was measured on another machine, one WARNING is logged, and the scaled default is used.
If the directory cannot be written, every process measures once. torch is imported only to measure.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from apollo_compile.device.cpu.machine import cpu_model, machine_fingerprint
from apollo_compile.ir import KernelKind
from apollo_compile.store.files import FileState
from apollo_compile.store.profiles import cached_profile_path, default_profile, inspect_profile, save_profile
from apollo_compile.target.profile import DeviceProfile, Rate, limit_units
from apollo_compile.units import NS_PER_S

_logger = logging.getLogger(__name__)

LEAST_CPU_SHARE = 0.8
"""CPU time over wall time, per thread, below which another process occupied a core."""

_MATMUL_SIZE = 256
"""Rows, columns and inner dimension of the matmul."""

_VECTOR_BYTES = 8 * 2**20
_ROUNDS = 12


@functools.cache
def discover_profile(units: int, *, cache_dir: Path | None = None) -> DeviceProfile:
    """Return the profile of this machine for `units` units; it does not change within a process.

    `cache_dir` is the directory of cached profiles; None caches in this process only.
    """
    if cache_dir is None:
        return _scale_default(units)[0]
    path, fingerprint = cached_profile_path(cache_dir, units), machine_fingerprint(units)
    found = inspect_profile(path, fingerprint)
    calibrated = None if _is_calibrated(found.content) else _calibrated_for_more(units, cache_dir)
    if calibrated is not None:
        return limit_units(calibrated, units)
    if found.content is not None:
        return found.content
    if found.state is not FileState.MISSING:
        _logger.warning(
            "device profile %s is %s (%s); using the default until you run 'apollo calibrate'",
            path,
            found.state.value,
            found.detail,
        )
    profile, is_disturbed = _scale_default(units)
    if is_disturbed:
        _logger.info("the measured device profile is not kept: other processes used the CPU during the measurement")
    elif found.state is FileState.MISSING:
        try:
            save_profile(profile, path, fingerprint=fingerprint)
        except OSError as error:
            _logger.info("the measured device profile is not kept: %s", error)
    return profile


def _is_calibrated(profile: DeviceProfile | None) -> bool:
    return profile is not None and profile.source == "measured"


def _calibrated_for_more(units: int, cache_dir: Path) -> DeviceProfile | None:
    """Return the calibrated profile of the fewest cores above `units`; None if there is none."""
    for more in range(units + 1, (os.cpu_count() or 1) + 1):
        path = cached_profile_path(cache_dir, more)
        if path.exists() and _is_calibrated(found := inspect_profile(path, machine_fingerprint(more)).content):
            return found
    return None


# -------------------------------------------------------------------------------------------- quick measurement


def _scale_default(units: int) -> tuple[DeviceProfile, bool]:
    """Return the packaged profile scaled to this machine, and whether other processes disturbed its measurement."""
    default = default_profile(units)
    # Torch's modes are per thread, and a compile runs in a mode that makes all tensors fake. So a separate thread
    # measures.
    with ThreadPoolExecutor(1) as thread:
        matmul_ns, linear_ns, addition_ns, is_disturbed = thread.submit(_measure_quickly).result()
    flops, num_bytes = 2 * _MATMUL_SIZE**3, 3 * _VECTOR_BYTES
    faster = flops / matmul_ns * NS_PER_S / default.flops_per_s(KernelKind.MATMUL, "float32", flops, 1)
    in_bodies = faster * matmul_ns / linear_ns
    wider = num_bytes / addition_ns * NS_PER_S / default.near_rate(num_bytes, 1)
    profile = replace(
        default,
        name=f"{cpu_model()} x{units}",
        source="scaled",
        arithmetic=tuple(  # bodies choose the library of float32 matmuls
            replace(table, rates=_scale(table.rates, in_bodies))
            if (table.kind, table.dtype) == (KernelKind.MATMUL, "float32")
            else replace(table, rates=_scale(table.rates, faster))
            for table in default.arithmetic
        ),
        near_bytes_per_s=_scale(default.near_bytes_per_s, wider),
        far_bytes_per_s=_scale(default.far_bytes_per_s, wider),
        notes=(f"the packaged profile: matmuls x {in_bodies:.2f}, arithmetic x {faster:.2f}, bytes x {wider:.2f}",),
    )
    return profile, is_disturbed


def _scale(rates: Sequence[Rate], factor: float) -> tuple[Rate, ...]:
    return tuple(replace(rate, per_s=tuple(value * factor for value in rate.per_s)) for rate in rates)


def _measure_quickly() -> tuple[int, int, int, bool]:
    """Return the times of a matmul by BLAS, of one in a body, and of an addition, and whether they were disturbed."""
    import torch

    from apollo_compile.device.cpu.matmul_libraries import call_as_bodies

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        size = (_MATMUL_SIZE, _MATMUL_SIZE)
        left, right, out = (torch.ones(size, dtype=torch.float32, device="cpu") for _ in range(3))
        vector, total = (torch.ones(_VECTOR_BYTES // 4, dtype=torch.float32, device="cpu") for _ in range(2))
        matmul_ns, matmul_share = _best_of(lambda: torch.mm(left, right, out=out))
        linear_ns, linear_share = _best_of(call_as_bodies(_MATMUL_SIZE, 1))  # two matmuls
        addition_ns, addition_share = _best_of(lambda: total.add_(vector))
    torch.set_num_threads(threads)  # the last thread that sets it decides for new threads
    is_disturbed = min(matmul_share, linear_share, addition_share) < LEAST_CPU_SHARE
    return matmul_ns, linear_ns // 2, addition_ns, is_disturbed


def _best_of(call: Callable[[], object]) -> tuple[int, float]:
    """Return the wall time of the fastest round, and the thread's CPU time in it as a share of wall time."""
    call()  # the first call loads code and touches pages
    rounds = []
    for _ in range(_ROUNDS):
        begin, cpu_begin = time.perf_counter_ns(), time.thread_time_ns()
        call()
        elapsed = max(time.perf_counter_ns() - begin, 1)
        rounds.append((elapsed, (time.thread_time_ns() - cpu_begin) / elapsed))
    return min(rounds)
