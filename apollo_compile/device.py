"""What the compiler believes about the device: calibrated constants, measured once and kept in a file.

    default_profile(units)                  round numbers for this class of CPU, for tests and dumps
    discover_profile(units, cache_dir=...)  this machine's numbers: from the cache, else measured in about half a second
    load_profile(path), save_profile(...)   the file form

A quick measurement takes the best of a few repeats of a layer's matrix product and of an addition of vectors, on one
unit and on all; the counts between are interpolated. Fixed times (kernels, hand-overs) are constants: half a second is
too short to measure microseconds well. Another process on the same cores makes a device look as if it did not scale,
and a plan from such a profile would put everything on small lanes. So a round counts as disturbed where the process got
less CPU time than its threads should have had; disturbed results are not kept in the file, and matrix products are
taken to scale by at least LEAST_SCALING per unit in any case.

A file carries the fingerprint of what it was measured on: CPU model, core count, torch version. A damaged file, or one
from another machine or version, is measured anew with a WARNING; a directory that cannot be written costs one
measurement per process. torch is imported only to measure.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from apollo_compile.errors import ConfigError
from apollo_compile.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

_logger = logging.getLogger(__name__)

Source = Literal["default", "measured", "datasheet"]

_FORMAT = 3
"""Number of the file form; another number means stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """Calibrated constants of one device. Rates are per number of units: index `u - 1` holds those of `u` units."""

    name: str
    source: Source
    units: int
    """Cores that may be used."""
    flops_per_s: tuple[float, ...]
    """Floating point operations of a layer's matrix product."""
    bytes_per_s: tuple[float, ...]
    """Bytes read and written by a loop over tensors that do not fit into the cache."""
    kernel_ns: int
    """Fixed time of one kernel on one unit: the call and what it allocates."""
    parallel_ns: int
    """Added to it on more than one unit: waking the team and meeting at its end."""
    launch_ns: int
    """Fixed time of one segment: calling its body."""
    handover_ns: int
    """From the end of a segment to the start of its reader on another lane."""

    def __post_init__(self) -> None:
        """Refuse rates that do not fit the units."""
        rates = (*self.flops_per_s, *self.bytes_per_s)
        if self.units < 1 or not len(self.flops_per_s) == len(self.bytes_per_s) == self.units or min(rates) <= 0:
            raise ValueError(
                f"device profile {self.name!r} is not usable: expected {self.units} positive rates of each kind, got "
                f"{self.flops_per_s} and {self.bytes_per_s}; delete its file to measure anew"
            )


def default_profile(units: int) -> DeviceProfile:
    """Return round numbers for a server core with AVX-512: the same on every machine."""
    return DeviceProfile(
        name=f"default-{units}",
        source="default",
        units=units,
        flops_per_s=tuple(150e9 * count for count in range(1, units + 1)),
        bytes_per_s=tuple(20e9 * _bandwidth_share(count) for count in range(1, units + 1)),
        **_FIXED_NS,
    )


def discover_profile(units: int, *, cache_dir: Path | None = None) -> DeviceProfile:
    """Return the profile of this machine for `units` units, measured at most once per process.

    `cache_dir` keeps measurements between processes; None keeps them in this process only.
    """
    return _discover(units, cache_dir)


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile from a file.

    Raises:
        ConfigError: the file cannot be read or is no profile.
    """
    try:
        profile, _ = _read(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"cannot read device profile {path}: {error}; expected a file that save_profile or a measurement wrote"
        ) from error
    return profile


def save_profile(profile: DeviceProfile, path: Path, *, fingerprint: dict[str, Any] | None = None) -> None:
    """Write a profile to a file, at once or not at all. Raises `OSError` where that is impossible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, "fingerprint": fingerprint or {}, "profile": dataclasses.asdict(profile)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=2)
        Path(temporary).replace(path)  # a reader sees the old file or the new one, never a part
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------------------------------------------------- cache


@functools.cache
def _discover(units: int, cache_dir: Path | None) -> DeviceProfile:
    fingerprint = machine_fingerprint(units)
    if cache_dir is None:
        return _measure(units)[0]
    path = cache_dir / f"profile-{units}.json"
    cached = _read_if_current(path, fingerprint, units)
    if cached is not None:
        return cached
    profile, is_disturbed = _measure(units)
    if is_disturbed:
        _logger.info("other processes kept this machine busy while it was measured; its device profile is not kept")
        return profile
    try:
        save_profile(profile, path, fingerprint=fingerprint)
    except OSError as error:
        _logger.info("the measured device profile is not kept: %s", error)
    return profile


def machine_fingerprint(units: int) -> dict[str, Any]:
    """Return what a measurement depends on: CPU model, cores and torch version."""
    from importlib.metadata import version

    return {"cpu": cpu_model(), "cores": os.cpu_count(), "units": units, "torch": version("torch")}


def cpu_model() -> str:
    """Return the name of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _read_if_current(path: Path, fingerprint: dict[str, Any], units: int) -> DeviceProfile | None:
    if not path.exists():
        return None
    try:
        profile, measured_on = _read(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        _logger.warning("device profile %s is damaged (%s); measuring this machine anew", path, error)
        return None
    if measured_on != fingerprint or profile.units != units:
        changed = [key for key in fingerprint if measured_on.get(key) != fingerprint[key]] or ["units"]
        difference = ", ".join(f"{key} {measured_on.get(key)!r} is now {fingerprint.get(key)!r}" for key in changed)
        _logger.warning("device profile %s is stale (%s); measuring this machine anew", path, difference)
        return None
    return profile


def _read(path: Path) -> tuple[DeviceProfile, dict[str, Any]]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"expected a profile of format {_FORMAT}")
    values = dict(content["profile"])
    if values.get("source") not in get_args(Source):
        raise ValueError(f"unknown source {values.get('source')!r}; known: {', '.join(get_args(Source))}")
    for key in ("flops_per_s", "bytes_per_s"):
        values[key] = tuple(float(rate) for rate in values[key])
    for key in ("units", "kernel_ns", "parallel_ns", "launch_ns", "handover_ns"):
        values[key] = int(values[key])
    return DeviceProfile(**values), dict(content["fingerprint"])


# ---------------------------------------------------------------------------------------------------- measurement

_FIXED_NS: dict[str, int] = {"kernel_ns": 6_000, "parallel_ns": 8_000, "launch_ns": 5_000, "handover_ns": 5_000}
"""A kernel's call, allocation and packing (fitted on segments of CLIP and two towers), an OpenMP region, a body's call,
a native wake-up."""

_PRODUCT_SHAPE = (64, 256, 1024)
"""Rows, depth and columns of a layer's product at a small batch: large squares scale to more units than layers do."""

_PRODUCTS = 16
"""Products per round."""

_VECTOR_BYTES = 32 * 2**20
_ROUNDS = 8


LEAST_SCALING = 0.6
"""Share of a unit's flops that every further unit adds at least."""

_LEAST_CPU_SHARE = 0.8
"""CPU time over wall time and thread below which another process held a core."""


@dataclass(frozen=True, slots=True)
class _Rates:
    flops_per_s: float
    bytes_per_s: float
    is_disturbed: bool


def _measure(units: int) -> tuple[DeviceProfile, bool]:
    """Return the profile, and whether other processes disturbed its measurement."""
    # Torch's modes belong to a thread, and a compile runs under one that makes every tensor a fake: a product of fakes
    # takes a millisecond whatever its size. So a thread of its own measures.
    with ThreadPoolExecutor(1) as thread:
        alone = thread.submit(_measure_rates, 1).result()
        together = thread.submit(_measure_rates, units).result() if units > 1 else alone
    flops_per_s = max(together.flops_per_s, alone.flops_per_s * (1 + LEAST_SCALING * (units - 1)))
    bytes_per_s = max(together.bytes_per_s, alone.bytes_per_s)
    shares = [_bandwidth_share(count) - 1 for count in range(1, units + 1)]
    profile = DeviceProfile(
        name=f"{cpu_model()} x{units}",
        source="measured",
        units=units,
        flops_per_s=_interpolate(alone.flops_per_s, flops_per_s, [float(count) for count in range(units)]),
        bytes_per_s=_interpolate(alone.bytes_per_s, bytes_per_s, shares),
        **_FIXED_NS,
    )
    return profile, alone.is_disturbed or together.is_disturbed


def _interpolate(alone: float, together: float, progress: list[float]) -> tuple[float, ...]:
    """Go from `alone` to `together` as `progress` goes from 0 to its last value."""
    if len(progress) == 1:
        return (alone,)
    return tuple(alone + (together - alone) * step / progress[-1] for step in progress)


def _bandwidth_share(units: int) -> float:
    """Return the bandwidth of `units` units in units of that of one: a few saturate the memory."""
    return units / (1 + (units - 1) / 8)


def _measure_rates(threads: int) -> _Rates:
    """Measure a matrix product and an addition of vectors, best of a few rounds."""
    import torch

    with _threads(threads), torch.no_grad():
        rows, depth, columns = _PRODUCT_SHAPE
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        left, right = torch.ones(rows, depth, **kind), torch.ones(depth, columns, **kind)
        product = torch.empty(rows, columns, **kind)
        vector = torch.ones(_VECTOR_BYTES // 4, **kind)
        total = torch.ones(_VECTOR_BYTES // 4, **kind)

        def multiply() -> torch.Tensor:
            for _ in range(_PRODUCTS):
                torch.mm(left, right, out=product)
            return product

        product_ns, product_share = _best_of(multiply)
        addition_ns, addition_share = _best_of(lambda: total.add_(vector))
    return _Rates(
        flops_per_s=2 * rows * depth * columns * _PRODUCTS / product_ns * NS_PER_S,
        bytes_per_s=3 * _VECTOR_BYTES / addition_ns * NS_PER_S,
        is_disturbed=min(product_share, addition_share) < _LEAST_CPU_SHARE * threads,
    )


def _best_of(call: Callable[[], object]) -> tuple[int, float]:
    """Return the wall time of the fastest round and the CPU time the process got in it, as a multiple of wall time."""
    call()  # the first call loads code and touches pages
    rounds = []
    for _ in range(_ROUNDS):
        begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
        call()
        elapsed = max(time.perf_counter_ns() - begin, 1)
        rounds.append((elapsed, (time.process_time_ns() - cpu_begin) / elapsed))
    return min(rounds)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
