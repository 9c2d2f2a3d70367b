"""Device profiles: the calibrated constants and rates of one device.

    DeviceProfile                   the constants of one device
    limit_units(profile, units)     the same device with another number of units
    rate_at(rates, ...)             a rate, interpolated in a table

Rates are tables, by the size of one kernel (flops or bytes) and by the number of units that it may use. Between sizes a
rate is interpolated on logarithmic scales, between numbers of units linearly; beyond either end it is constant.

`store/profiles.py` reads and writes files of profiles. `device/cpu/discover.py` finds that of a CPU, and
`device/cpu/calibrate.py` measures it; that of a GPU is a data sheet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from apollo_compile.ir import KernelKind, Lane
from apollo_compile.target.lanes import lane_catalogue


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Rate of a kernel of one size, by number of units."""

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
    """The numbers of units in rate tables, ascending from 1."""
    arithmetic: tuple[Arithmetic, ...]
    """Rates of arithmetic, without the fixed time of a kernel."""
    near_bytes_per_s: tuple[Rate, ...]
    """Rate for reading data made by the same segment, and for writes, by bytes that one kernel moves."""
    far_bytes_per_s: tuple[Rate, ...]
    """Rate for reading data made by other segments, by the footprint in bytes of a run of the program."""
    kernel_ns: int
    """Fixed time of one kernel on one unit."""
    parallel_ns: int
    """Added to it on more than one unit: waking the thread team and its final barrier."""
    cold_ns: int
    """Added to it where a body first runs in a program, with its code in no near cache."""
    launch_ns: int
    """Fixed time of one segment: calling its body."""
    tensor_ns: int
    """Added to it per input and output tensor of the body: making and freeing a handle, checking a layout."""
    handover_ns: int
    """From the end of a segment to the start of its reader on another lane."""
    slowdown: tuple[tuple[float, float], tuple[float, float]]
    """Slowdown factors of (arithmetic, memory) on one half of the units beside (arithmetic, memory) on the other."""
    notes: tuple[str, ...] = ()
    """Sources of the numbers."""
    atoms: tuple[int, ...] | None = None
    """Sizes of the groups in which units are assigned to lanes, in order; None means one unit each."""

    def __post_init__(self) -> None:
        """Check that the numbers are consistent."""
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
        """How arithmetic and memory time of one kernel combine: their sum, or the longer of the two."""
        return "sum" if self.kind == "cpu" else "max"

    @property
    def is_predictable(self) -> bool:
        """Whether formulas are accurate enough to tell, before anything has run, that a plan gains nothing.

        On a GPU they are inaccurate until bodies are timed: a matmul that just fits the whole device takes twice as
        long on a slightly smaller lane.
        """
        return self.kind == "cpu"

    @property
    def owners_release(self) -> bool:
        """Whether freed memory returns to the lane that allocated it, so that only that lane may release it."""
        return self.kind == "cuda"

    def flops_per_s(self, kind: KernelKind, dtype: str, flops: int, units: int) -> float:
        """Return the rate of a kernel on `units` units.

        A kind or dtype without a table uses that of the nearest one: the same kind in float32, then matmul.
        """
        return rate_at(_table(self, kind, dtype), self.unit_counts, flops, units)

    def near_rate(self, num_bytes: int, units: int) -> float:
        """Return the bytes per second of a kernel that moves `num_bytes` of recently made data."""
        return rate_at(self.near_bytes_per_s, self.unit_counts, num_bytes, units)

    def far_rate(self, footprint: int, units: int) -> float:
        """Return the bytes per second of reading other segments' data, in a program that touches `footprint` bytes."""
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
"""The kind whose rates are used for a kind without rates."""


def _table(profile: DeviceProfile, kind: KernelKind, dtype: str) -> tuple[Rate, ...]:
    while True:
        found = {table.dtype: table.rates for table in profile.arithmetic if table.kind is kind}
        if found:
            return found.get(dtype) or found.get("float32") or next(iter(found.values()))
        kind = _NEXT_BEST[kind]


def rate_at(rates: Sequence[Rate], unit_counts: Sequence[int], size: int, units: int) -> float:
    """Return the rate of a kernel of `size` on `units` units, interpolated in a table."""
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
    """Return the index of the last count that is not above `units`, and the fraction towards the next count."""
    place = max((index for index, count in enumerate(counts) if count <= units), default=0)
    if place == len(counts) - 1 or units <= counts[place]:
        return place, 0.0
    return place, (units - counts[place]) / (counts[place + 1] - counts[place])


def limit_units(profile: DeviceProfile, units: int) -> DeviceProfile:
    """Return the profile of `units` units of the same device."""
    atoms = profile.atoms
    if atoms is not None:
        num_full = max(0, units // atoms[0] - 1)  # the last one has the remainder, too
        atoms = (*num_full * atoms[:1], units - num_full * atoms[0])
    return replace(profile, name=f"{profile.name} x{units}", units=units, atoms=atoms)
