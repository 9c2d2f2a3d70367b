"""What the compiler believes about the device: constants of one device, and how fast it is at what.

    discover_profile(units, cache_dir=...)  this machine: calibrated if it was, else the default scaled to it
    discover_gpu_profile(...)               a GPU: calibrated if it was, else what an H200's data sheet says
    load_profile(path), save_profile(...)   the file form; `load_profile` also takes the name of a packaged profile
    default_profile(units)                  the packaged profile of CPUs: the same on every machine

A rate depends on how large a kernel is, so rates are tables: by the size of one kernel (flops or bytes) and by the
number of units that it may use. Between table sizes a rate is interpolated on logarithmic scales, between numbers of
units linearly; beyond either end it stays as it is at that end.

`apollo calibrate` measures every number and keeps the profile in a file with the fingerprint of what it was measured
on: device, driver, torch, cores and units. Where nobody has calibrated, a quick measurement on one thread (a matrix
product and an addition of vectors, in about a twentieth of a second) scales the packaged profile, and that is kept
instead. One thread, because a team of OpenMP threads on top of the caller's slows every later parallel region down.
Another process on the core makes a device look slow, so a round counts as disturbed where the process got less CPU
time than it should have had; a disturbed result is used, but not kept.

A file that is damaged, or was measured on something else, is one WARNING that says what changed; the scaled default
takes its place. A directory that cannot be written costs one measurement per process. torch is imported only to
measure.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.errors import ConfigError
from apollo_compile.ir import KernelKind, Lane
from apollo_compile.json_form import check_format, from_json, parse, read_file, to_json, write_file
from apollo_compile.units import NS_PER_S

_logger = logging.getLogger(__name__)

FORMAT = 5
"""Number of the file form; another number means stale."""

_MAX_BYTES = 4 * 2**20
"""A measured profile takes about 20 kB."""

DRIVER_RELEASE = Path("/sys/module/nvidia/version")
"""Where Linux tells the release of NVIDIA's driver."""

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Flags of an x86 CPU that decide which kernels libraries of matrix products have for it."""

LEAST_CPU_SHARE = 0.8
"""CPU time over wall time and thread below which another process held a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What a kernel of about one size achieves per second, by number of units."""

    size: int
    """Flops or bytes of the kernel."""
    per_s: tuple[float, ...]
    """One number per entry of `DeviceProfile.unit_counts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Flops per second of one kind of kernel, by flops of one kernel, ascending."""

    kind: KernelKind
    dtype: str
    rates: tuple[Rate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """Constants of one device."""

    kind: Literal["cpu", "cuda"]
    name: str
    source: Literal["default", "scaled", "measured", "datasheet"]
    """`scaled` is the default, scaled by a quick measurement; `measured` is calibrated."""
    units: int
    """Units that may be used."""
    unit_counts: tuple[int, ...]
    """Numbers of units that rates are given for, ascending from 1."""
    arithmetic: tuple[Arithmetic, ...]
    """Beyond the fixed time of a kernel."""
    near_bytes_per_s: tuple[Rate, ...]
    """Bytes of what the segment itself made, and of what it makes, by bytes that one kernel moves."""
    far_bytes_per_s: tuple[Rate, ...]
    """Bytes read that other segments made, by bytes of everything that a run of the program touches."""
    kernel_ns: int
    """Fixed time of one kernel on one unit."""
    parallel_ns: int
    """Added to it on more than one unit: waking the team and meeting at its end."""
    cold_ns: int
    """Added to it where a body runs for the first time in a program: its code is in no near cache."""
    launch_ns: int
    """Fixed time of one segment: calling its body."""
    tensor_ns: int
    """Added to it for every tensor that the body takes or returns: making and freeing a handle, checking a layout."""
    handover_ns: int
    """From the end of a segment to the start of its reader on another lane."""
    slowdown: tuple[tuple[float, float], tuple[float, float]]
    """How many times longer (arithmetic, memory) takes on one half beside (arithmetic, memory) on the other half."""
    notes: tuple[str, ...] = ()
    """Where the numbers come from."""
    atoms: tuple[int, ...] | None = None
    """Units of every group in which they are given to lanes, in order; None is one each."""

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit each other."""
        tables = [*(table.rates for table in self.arithmetic), self.near_bytes_per_s, self.far_bytes_per_s]
        for rates in tables:
            sizes = [rate.size for rate in rates]
            if not rates or sizes != sorted(set(sizes)) or sizes[0] < 1:
                self._refuse(f"expected rates of ascending sizes, got sizes {sizes}")
            for rate in rates:
                if len(rate.per_s) != len(self.unit_counts) or min(rate.per_s) <= 0:
                    self._refuse(f"expected {len(self.unit_counts)} positive rates, got {rate.per_s}")
        counts = list(self.unit_counts)
        if counts != sorted(set(counts)) or counts[:1] != [1] or self.units < 1:
            self._refuse(f"expected unit counts from 1 up and at least 1 unit, got {counts} and {self.units}")
        if self.atoms is not None and (min(self.atoms, default=0) < 1 or sum(self.atoms) > self.units):
            self._refuse(f"expected atoms of {self.units} units together at most, got {self.atoms}")
        if not {(KernelKind.LOOP, "float32"), (KernelKind.MATMUL, "float32")} <= {
            (table.kind, table.dtype) for table in self.arithmetic
        }:
            self._refuse("expected float32 rates of loops and of matrix products")
        if min(getattr(self, name) for name in _TIMES) < 0:
            self._refuse("expected no negative time")
        if min(factor for row in self.slowdown for factor in row) < 1:
            self._refuse(f"expected slowdowns of at least 1, got {self.slowdown}")

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that a program may use."""
        return lane_catalogue(self.units, self.atoms)

    @property
    def overlap(self) -> Literal["sum", "max"]:
        """How arithmetic and memory of one kernel combine: one after the other, or the longer of the two."""
        return "max" if self.kind == "cuda" else "sum"

    @property
    def is_predictable(self) -> bool:
        """Whether formulas are near enough to tell, before anything has run, that a plan gains nothing.

        On a GPU they are far off until bodies were timed: a matmul that just fits the whole device takes twice as long
        on a lane that is a little smaller.
        """
        return self.kind == "cpu"

    @property
    def owners_release(self) -> bool:
        """Whether memory goes back to the lane that made it, so that only that lane may release it."""
        return self.kind == "cuda"

    def flops_per_s(self, kind: KernelKind, dtype: str, flops: int, units: int) -> float:
        """Return the rate of a kernel on `units` units.

        A kind or dtype without a table takes the nearest one that has: the same kind in float32, then products.
        """
        return rate_at(_table(self, kind, dtype), self.unit_counts, flops, units)

    def near_rate(self, num_bytes: int, units: int) -> float:
        """Return the bytes per second of a kernel that moves `num_bytes` of what was just made."""
        return rate_at(self.near_bytes_per_s, self.unit_counts, num_bytes, units)

    def far_rate(self, footprint: int, units: int) -> float:
        """Return the bytes per second of reading what others made, in a program that touches `footprint` bytes."""
        return rate_at(self.far_bytes_per_s, self.unit_counts, footprint, units)

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"device profile {self.name!r} is not usable: {problem}; run 'apollo calibrate'")


_TIMES = ("kernel_ns", "parallel_ns", "cold_ns", "launch_ns", "tensor_ns", "handover_ns")

_NEXT_BEST = {
    KernelKind.BATCHED_MATMUL: KernelKind.MATMUL,
    KernelKind.ATTENTION: KernelKind.BATCHED_MATMUL,
    KernelKind.ATTENTION_BACKWARD: KernelKind.ATTENTION,
    KernelKind.CONVOLUTION: KernelKind.MATMUL,
    KernelKind.CONVOLUTION_BACKWARD: KernelKind.CONVOLUTION,
    KernelKind.SCATTER: KernelKind.LOOP,
    KernelKind.LIBRARY: KernelKind.SCATTER,
}
"""Whose rates a kind takes that has none."""


def _table(profile: DeviceProfile, kind: KernelKind, dtype: str) -> tuple[Rate, ...]:
    while True:
        found = {table.dtype: table.rates for table in profile.arithmetic if table.kind is kind}
        if found:
            return found.get(dtype) or found.get("float32") or next(iter(found.values()))
        kind = _NEXT_BEST[kind]


def rate_at(rates: Sequence[Rate], unit_counts: Sequence[int], size: int, units: int) -> float:
    """Return the rate of a kernel of `size` on `units` units, between the entries of a table."""
    place, share = _between(unit_counts, units)

    def at(rate: Rate) -> float:
        return rate.per_s[place] + share * (rate.per_s[min(place + 1, len(rate.per_s) - 1)] - rate.per_s[place])

    if size <= rates[0].size:
        return at(rates[0])
    for low, high in itertools.pairwise(rates):
        if size <= high.size:
            progress = math.log(size / low.size) / math.log(high.size / low.size)
            return math.exp((1 - progress) * math.log(at(low)) + progress * math.log(at(high)))
    return at(rates[-1])


def _between(counts: Sequence[int], units: int) -> tuple[int, float]:
    """Return the last count that is not above `units`, and how far `units` is on the way to the next one."""
    place = max((index for index, count in enumerate(counts) if count <= units), default=0)
    if place == len(counts) - 1 or units <= counts[place]:
        return place, 0.0
    return place, (units - counts[place]) / (counts[place + 1] - counts[place])


def limit_units(profile: DeviceProfile, units: int) -> DeviceProfile:
    """Return the profile of `units` units of the same device."""
    atoms = profile.atoms
    if atoms is not None:
        num_full = max(0, units // atoms[0] - 1)  # the last has what is left over
        atoms = (*num_full * atoms[:1], units - num_full * atoms[0])
    return replace(profile, name=f"{profile.name} x{units}", units=units, atoms=atoms)


# --------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What a measurement depends on."""

    device: str
    driver: str | None
    """None where the device needs none."""
    torch: str
    cores: int
    units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    format: int
    fingerprint: Fingerprint | None
    profile: DeviceProfile


def packaged_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    files = (file.name for file in resources.files("apollo_compile.device").joinpath("profiles").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile from a file, or the packaged profile of that name if there is no such file.

    Raises:
        ConfigError: the file cannot be read or is no profile.
    """
    try:
        return _to_file(read_file(path, max_bytes=_MAX_BYTES)).profile
    except FileNotFoundError as error:
        if str(path) in packaged_profiles():
            return _load_packaged(str(path))
        raise _unreadable(path, error) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read device profile {path}: {error}; expected a file that 'apollo calibrate' wrote, or one of "
        f"{', '.join(packaged_profiles())}"
    )


def save_profile(profile: DeviceProfile, path: Path, *, fingerprint: Fingerprint | None = None) -> None:
    """Write a profile to a file, at once or not at all. Raises `OSError` where that is impossible."""
    write_file(path, format_profile(profile, fingerprint=fingerprint))


def format_profile(profile: DeviceProfile, *, fingerprint: Fingerprint | None = None) -> str:
    """Return the text of a profile's file."""
    content = _File(format=FORMAT, fingerprint=fingerprint, profile=profile)
    return json.dumps(to_json(content), indent=1) + "\n"


def default_profile(units: int) -> DeviceProfile:
    """Return the packaged profile of CPUs for `units` units: the same on every machine."""
    return limit_units(_load_packaged("cpu"), units)


@functools.cache
def _load_packaged(name: str) -> DeviceProfile:
    text = resources.files("apollo_compile.device").joinpath("profiles", f"{name}.json").read_text(encoding="utf-8")
    return _to_file(parse(text)).profile


def _to_file(content: Any) -> _File:
    return from_json(_File, check_format(content, "profile", FORMAT))


# ---------------------------------------------------------------------------------------------------------- cache


def discover_profile(units: int, *, cache_dir: Path | None = None) -> DeviceProfile:
    """Return the profile of this machine for `units` units, the same at every call in one process.

    `cache_dir` keeps profiles between processes; None keeps them in this process only.
    """
    return _discover(units, cache_dir)


def cached_profile_path(cache_dir: Path, units: int) -> Path:
    """Return the file in which the profile of this machine for `units` units is kept."""
    return cache_dir / f"profile-{units}.json"


def discover_gpu_profile(fingerprint: Fingerprint, *, cache_dir: Path | None = None) -> DeviceProfile:
    """Return the profile of the GPU that `fingerprint` is of; an H200's by the data sheet where it was not measured."""
    path = None if cache_dir is None else cached_gpu_profile_path(cache_dir, fingerprint)
    found = None if path is None else _inspect(path, fingerprint)
    if found is not None and found.profile is not None:
        return found.profile
    substitute = _load_packaged("h200")
    if found is None or found.state is ProfileState.MISSING:  # else it was said what is wrong with the file
        _warn_of_substitute(fingerprint.device, substitute.name)
    return substitute


@functools.cache
def _warn_of_substitute(device: str, name: str) -> None:
    """Say once per GPU that it counts as another one."""
    if not f"{name} ".startswith(f"{device} "):
        _logger.warning("%s was not measured: plans count on an %s; 'apollo calibrate --gpu' measures it", device, name)


def cached_gpu_profile_path(cache_dir: Path, fingerprint: Fingerprint) -> Path:
    """Return the file in which the profile of a GPU is kept."""
    name = "".join(letter if letter.isalnum() else "-" for letter in fingerprint.device)
    return cache_dir / f"profile-{name}-{fingerprint.units}.json"


def gpu_fingerprint(name: str, *, cuda: int, units: int, release_file: Path = DRIVER_RELEASE) -> Fingerprint:
    """Return what a measurement of a GPU depends on.

    Arguments:
        name: of the GPU.
        cuda: version of CUDA that the driver speaks, as 13000; many releases of the driver speak the same.
        units: all its SMs.
        release_file: where the kernel tells the release of its driver; the version of CUDA alone counts without one.
    """
    try:
        driver = f"{release_file.read_text(encoding='utf-8').strip()} (CUDA {cuda})"
    except OSError:
        driver = f"CUDA {cuda}"
    return Fingerprint(device=name, driver=driver, torch=_torch_version(), cores=units, units=units)


@functools.cache
def _discover(units: int, cache_dir: Path | None) -> DeviceProfile:
    if cache_dir is None:
        return _scale_default(units)[0]
    path, fingerprint = cached_profile_path(cache_dir, units), machine_fingerprint(units)
    found = _inspect(path, fingerprint)
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


def machine_fingerprint(units: int) -> Fingerprint:
    """Return what a measurement on this machine depends on."""
    cores = os.cpu_count() or 1
    return Fingerprint(device=cpu_model(), driver=None, torch=_torch_version(), cores=cores, units=units)


def _torch_version() -> str:
    """Return torch's version, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:  # in a tree of its sources
        return "unknown"


def cpu_model() -> str:
    """Return the name of the CPU, as far as the system tells."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_description() -> str:
    """Return vendor and model of the CPU, and which of `CPU_FEATURES` it has: a step's time depends on all of them."""
    facts = _cpu_facts()
    flags = facts.get("flags", "").split()
    told = [facts.get("vendor_id", ""), *(feature for feature in CPU_FEATURES if feature in flags)]
    return f"{cpu_model()} ({', '.join(filter(None, told))})" if any(told) else cpu_model()


def _cpu_facts() -> Mapping[str, str]:
    """Return what Linux says of the first CPU, by the name of the fact."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    facts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in facts}


def _inspect(path: Path, fingerprint: Fingerprint) -> ProfileInspection:
    """Return what a file holds; say so if it should be measured again."""
    found = inspect_profile(path, fingerprint)
    if found.profile is None and not found.is_replaceable:
        _logger.warning(
            "device profile %s is %s (%s); using the default until you run 'apollo calibrate'",
            path,
            found.state.value,
            found.detail,
        )
    return found


class ProfileState(enum.StrEnum):
    """What a file of a profile is worth."""

    CURRENT = "current"
    """Measured on this machine as it is."""
    SCALED = "scaled"
    """The same, but by the quick measurement."""
    MISSING = "missing"
    STALE = "stale"
    """Measured on something else."""
    DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileInspection:
    """What was found in a file."""

    state: ProfileState
    detail: str
    profile: DeviceProfile | None
    """If it can be used."""
    is_replaceable: bool = False
    """Whether a quick measurement may take its place: what a user calibrated is kept, even if it is stale."""


def inspect_profile(path: Path, fingerprint: Fingerprint) -> ProfileInspection:
    """Return whether the profile in a file is one of the machine that `fingerprint` is of."""
    try:
        content = _to_file(read_file(path, max_bytes=_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        missing = "there is no such file"
        return ProfileInspection(state=ProfileState.MISSING, detail=missing, profile=None, is_replaceable=True)
    except (OSError, ValueError) as error:
        return ProfileInspection(state=ProfileState.DAMAGED, detail=str(error), profile=None)
    is_scaled = content.profile.source == "scaled"
    if content.fingerprint != fingerprint or content.profile.units != fingerprint.units:
        detail = _difference(content.fingerprint, fingerprint)
        return ProfileInspection(state=ProfileState.STALE, detail=detail, profile=None, is_replaceable=is_scaled)
    state = ProfileState.SCALED if is_scaled else ProfileState.CURRENT
    return ProfileInspection(state=state, detail=content.profile.source, profile=content.profile)


def _difference(before: Fingerprint | None, now: Fingerprint) -> str:
    if before is None:
        return "it does not say where it was measured"
    pairs = ((field.name, getattr(before, field.name), getattr(now, field.name)) for field in fields(Fingerprint))
    return ", ".join(f"{name} {old!r} is now {new!r}" for name, old, new in pairs if old != new) or "other units"


# -------------------------------------------------------------------------------------------- quick measurement

_PRODUCT_SIZE = 256
"""Rows, depth and columns."""

_VECTOR_BYTES = 8 * 2**20
_ROUNDS = 12


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
