"""Find the profile of this machine: calibrated if it was, else the packaged one scaled to it.

    discover_profile(units, cache_dir=...) -> DeviceProfile

Where nobody has calibrated, a quick measurement on one thread (a matrix product and an addition of vectors, in about a
twentieth of a second) scales the packaged profile, and that is kept instead. One thread, because a team of OpenMP
threads on top of the caller's slows every later parallel region down. Another process on the core makes a device look
slow, so a round counts as disturbed where the process got less CPU time than it should have had; a disturbed result is
used, but not kept.

A file that is damaged, or was measured on something else, is one WARNING that says what changed; the scaled default
takes its place. A directory that cannot be written costs one measurement per process. torch is imported only to
measure.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from apollo_compile.device.cpu.machine import cpu_model, machine_fingerprint
from apollo_compile.device.profile import DeviceProfile, Rate
from apollo_compile.ir import KernelKind
from apollo_compile.store.profiles import cached_profile_path, default_profile, find_profile, save_profile
from apollo_compile.units import NS_PER_S

_logger = logging.getLogger(__name__)

LEAST_CPU_SHARE = 0.8
"""CPU time over wall time and thread below which another process held a core."""

_PRODUCT_SIZE = 256
"""Rows, depth and columns."""

_VECTOR_BYTES = 8 * 2**20
_ROUNDS = 12


def discover_profile(units: int, *, cache_dir: Path | None = None) -> DeviceProfile:
    """Return the profile of this machine for `units` units, the same at every call in one process.

    `cache_dir` keeps profiles between processes; None keeps them in this process only.
    """
    return _discover(units, cache_dir)


@functools.cache
def _discover(units: int, cache_dir: Path | None) -> DeviceProfile:
    if cache_dir is None:
        return _scale_default(units)[0]
    path, fingerprint = cached_profile_path(cache_dir, units), machine_fingerprint(units)
    found = find_profile(path, fingerprint)
    if found.profile is not None:
        return found.profile
    profile, is_disturbed = _scale_default(units)
    if is_disturbed:
        _logger.info("other processes kept this machine busy while it was measured; its device profile is not kept")
    elif found.is_replaceable:
        try:
            save_profile(profile, path, fingerprint=fingerprint)
        except OSError as error:
            _logger.info("the measured device profile is not kept: %s", error)
    return profile


# -------------------------------------------------------------------------------------------- quick measurement


def _scale_default(units: int) -> tuple[DeviceProfile, bool]:
    """Return the packaged profile scaled to this machine, and whether other processes disturbed its measurement."""
    default = default_profile(units)
    # Torch's modes belong to a thread, and a compile runs under one that makes every tensor a fake: a product of fakes
    # takes a millisecond whatever its size. So a thread of its own measures.
    with ThreadPoolExecutor(1) as thread:
        product_ns, addition_ns, is_disturbed = thread.submit(_measure_quickly).result()
    flops, num_bytes = 2 * _PRODUCT_SIZE**3, 3 * _VECTOR_BYTES
    faster = flops / product_ns * NS_PER_S / default.flops_per_s(KernelKind.MATMUL, "float32", flops, 1)
    wider = num_bytes / addition_ns * NS_PER_S / default.near_rate(num_bytes, 1)
    profile = replace(
        default,
        name=f"{cpu_model()} x{units}",
        source="scaled",
        arithmetic=tuple(replace(table, rates=_scale(table.rates, faster)) for table in default.arithmetic),
        near_bytes_per_s=_scale(default.near_bytes_per_s, wider),
        far_bytes_per_s=_scale(default.far_bytes_per_s, wider),
        notes=(f"the packaged profile: arithmetic x {faster:.2f}, bytes x {wider:.2f}",),
    )
    return profile, is_disturbed


def _scale(rates: Sequence[Rate], factor: float) -> tuple[Rate, ...]:
    return tuple(replace(rate, per_s=tuple(value * factor for value in rate.per_s)) for rate in rates)


def _measure_quickly() -> tuple[int, int, bool]:
    """Return the nanoseconds of a matrix product and of an addition of vectors, and whether they were disturbed."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread
    with torch.no_grad():
        size = (_PRODUCT_SIZE, _PRODUCT_SIZE)
        left, right, product = (torch.ones(size, dtype=torch.float32, device="cpu") for _ in range(3))
        vector, total = (torch.ones(_VECTOR_BYTES // 4, dtype=torch.float32, device="cpu") for _ in range(2))
        product_ns, product_share = _best_of(lambda: torch.mm(left, right, out=product))
        addition_ns, addition_share = _best_of(lambda: total.add_(vector))
    torch.set_num_threads(threads)  # the last thread that sets it decides for new threads
    return product_ns, addition_ns, min(product_share, addition_share) < LEAST_CPU_SHARE


def _best_of(call: Callable[[], object]) -> tuple[int, float]:
    """Return the wall time of the fastest round, and the CPU time the thread got in it as a share of wall time."""
    call()  # the first call loads code and touches pages
    rounds = []
    for _ in range(_ROUNDS):
        begin, cpu_begin = time.perf_counter_ns(), time.thread_time_ns()
        call()
        elapsed = max(time.perf_counter_ns() - begin, 1)
        rounds.append((elapsed, (time.thread_time_ns() - cpu_begin) / elapsed))
    return min(rounds)
