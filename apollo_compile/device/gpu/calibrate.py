"""Measure a GPU: rates on lanes of every size, the cost of hand-overs, and slowdowns of neighbours.

    calibrate_gpu(gpu, sheet, ...) -> DeviceProfile

Everything is timed under its quota: captured on a lane of that many SMs, between two events that are nodes of the CUDA
graph, and replayed. So times contain no work of the host.

quotas      Matmuls of several sizes, attention, and vector additions that fit into the cache or do not, on lanes of one
            atom, two atoms and so on up to all, and on the whole device. The additions show how many SMs saturate the
            memory. Times are quantized by waves, so every number of SMs is measured; a rate is that of full waves, as
            predictions assume.
fixed       A chain of almost empty kernels gives the least time of a kernel. The same chain, alternating between two
            lanes, gives the cost of a hand-over. A segment adds only its kernels to a CUDA graph, so launching a
            segment costs nothing.
neighbours  A matmul or an addition on one half of the device, while the other half runs a matmul or an addition.

Rates that are not measured (other dtypes, convolutions, scatters) are taken from the data sheet.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as functional

from apollo_compile.cost_model.roofline import wave_efficiency
from apollo_compile.device.gpu.gpu import Event, Gpu, Stream
from apollo_compile.device.gpu.launch import forked, order_after
from apollo_compile.device.lanes import atom_borders
from apollo_compile.device.profile import Arithmetic, DeviceProfile, Rate, rate_at
from apollo_compile.ir import KernelKind, Lane, LaneId
from apollo_compile.operators.formulas import TILE
from apollo_compile.units import NS_PER_S

UNTIMED_REPLAYS = 2
TIMED_REPLAYS = 7

CHAIN = 64
"""Kernels in a chain."""

MATMUL_LAUNCHES = 4
"""Matmuls timed together, since a small one hardly exceeds the clock's resolution; as many warm up before them."""

CACHED_LAUNCHES = 4
"""Additions of cached vectors timed together; as many warm up before them."""

NEIGHBOUR_ROUNDS = 4
"""Safety factor for the work of a neighbour, so that it is busy during all of the timed work."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the phase, the number of steps done, and the number of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the test kernels; the defaults fill an H200."""

    sides: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Rows and columns of matrices, ascending."""
    tokens: int = 2048
    """Tokens of an attention with 16 sequences, 16 heads and a head dimension of 64."""
    cached_bytes: int = 24 * 2**20
    """Bytes that an addition moves repeatedly, within the cache."""
    streamed_bytes: int = 768 * 2**20
    """Bytes that an addition moves, more than any cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """A timed kernel; called like a body."""

    name: str
    run: Callable[[], object]
    kind: KernelKind | None = None
    """The kind whose arithmetic it measures; None for memory and fixed times."""
    dtype: str = ""
    amount: int = 0
    """Flops or bytes per launch."""
    tiles: int = 0
    """Tiles of its output, each computed by one SM; 0 if waves do not matter."""
    launches: int = 1
    """Launches timed together; if several, as many come before them, to warm the cache."""

    @property
    def all_launches(self) -> int:
        """Number of launches, warm-up included."""
        return 2 * self.launches if self.launches > 1 else 1

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Launch the kernel on the current stream."""
        self.run()
        return ()


def calibrate_gpu(
    gpu: Gpu,
    sheet: DeviceProfile,
    *,
    name: str,
    device: torch.device,
    sizes: Sizes | None = None,
    progress: Progress = lambda what, done, total: None,
) -> DeviceProfile:
    """Return `sheet` with measured numbers where there are any.

    Arguments:
        gpu: the device; no other work should run on it.
        sheet: the data-sheet profile, with this device's units and atoms.
        name: name of the device.
        device: torch device of its tensors.
        sizes: sizes of the test kernels.
        progress: called before every step.
    """
    sizes = sizes or Sizes()
    lanes = _lanes(sheet)
    steps = iter(range(len(lanes) + 3))

    def begin(what: str) -> None:
        progress(what, next(steps), len(lanes) + 2)

    with torch.no_grad():
        probes = _make_probes(sizes, device)
        begin("kernels and hand-overs")
        kernel_ns, handover_ns = _fixed_times(gpu, device, sheet)
        times: dict[int, dict[str, int]] = {}
        for lane in lanes:
            begin("kernels on lanes")
            times[len(lane.units)] = time_on(gpu, lane, probes)
        begin("neighbours")
        slowdown = _slowdown(gpu, _halves(sheet), probes)
    begin("done")
    return _make_profile(sheet, name, probes, times, kernel_ns=kernel_ns, handover_ns=handover_ns, slowdown=slowdown)


def time_on(
    gpu: Gpu, lane: Lane, probes: Sequence[Probe], neighbour: tuple[Lane, Probe] | None = None, rounds: int = 1
) -> dict[str, int]:
    """Return the median nanoseconds per launch of each probe on a lane, by name; probes run one after the other.

    Arguments:
        gpu: the device.
        lane: the lane that probes are timed on.
        probes: the timed probes, all in one CUDA graph.
        neighbour: another lane, and a probe that runs on it at the same time.
        rounds: launches of the neighbour's probe.
    """
    timers: dict[str, tuple[Event, Event]] = {}

    def work(origin: Stream) -> None:
        stream = gpu.lane_stream(lane) or origin
        others = [] if neighbour is None else [gpu.lane_stream(neighbour[0]) or origin]
        lanes = [each for each in (stream, *others) if each is not origin]
        with forked(gpu, origin, lanes):
            for other in others:
                for _ in range(rounds):
                    gpu.call(neighbour[1], [], other)  # type: ignore[index]  # there is one
            for probe in probes:
                timers[probe.name] = begin, end = gpu.new_timer(), gpu.new_timer()
                for _ in range(probe.all_launches - probe.launches):
                    gpu.call(probe, [], stream)
                gpu.record(begin, stream)
                for _ in range(probe.launches):
                    gpu.call(probe, [], stream)
                gpu.record(end, stream)

    times = _replayed(gpu, work, timers)
    return {probe.name: max(1, times[probe.name] // probe.launches) for probe in probes}


def _replayed(gpu: Gpu, work: Callable[[Stream], None], timers: Mapping[str, tuple[Event, Event]]) -> dict[str, int]:
    """Return the median nanoseconds between the pairs of timers that `work` records."""
    work(gpu.caller_stream())  # loads code, and lets libraries allocate workspaces
    gpu.synchronize()
    recording = gpu.capture(work, None)
    times: dict[str, list[int]] = {name: [] for name in timers}
    for number in range(UNTIMED_REPLAYS + TIMED_REPLAYS):
        recording.replay()
        gpu.synchronize()
        if number >= UNTIMED_REPLAYS:
            for name, (begin, end) in timers.items():
                times[name].append(gpu.elapsed_ns(begin, end))
    return {name: max(1, round(statistics.median(found))) for name, found in times.items()}


def _borders(sheet: DeviceProfile) -> list[int]:
    """Return the borders of the atoms."""
    return atom_borders(sheet.atoms or (1,) * sheet.units)


def _lanes(sheet: DeviceProfile) -> list[Lane]:
    """Return one lane per number of atoms, and one with every unit."""
    counts = sorted({*_borders(sheet)[1:], sheet.units})
    return [Lane(id=LaneId(index + 1), units=tuple(range(count))) for index, count in enumerate(counts)]


def _halves(sheet: DeviceProfile) -> tuple[Lane, Lane] | None:
    """Return two lanes with equal numbers of atoms; None if the device has one atom."""
    borders = _borders(sheet)
    half = (len(borders) - 1) // 2
    if half == 0:
        return None
    ranges = (range(borders[half]), range(borders[half], borders[2 * half]))
    first, second = (Lane(id=LaneId(1 + index), units=tuple(each)) for index, each in enumerate(ranges))
    return first, second


# ---------------------------------------------------------------------------------------------------------- probes

_MATMUL = "product"
_CACHED = "cached bytes"
_STREAMED = "streamed bytes"


def _make_probes(sizes: Sizes, device: torch.device) -> list[Probe]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    probes = [_matmul(side, dtype, device) for dtype in dtypes for side in sizes.sides]
    probes += _attention(sizes.tokens, device)
    cached = _addition(_CACHED, sizes.cached_bytes, device, launches=CACHED_LAUNCHES)
    return [*probes, cached, _addition(_STREAMED, sizes.streamed_bytes, device)]


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> Probe:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    total, kind = torch.empty_like(left), str(dtype).removeprefix("torch.")
    return Probe(
        name=f"{_MATMUL} {kind} {side}",
        run=lambda: torch.mm(left, right, out=total),
        kind=KernelKind.MATMUL,
        dtype=kind,
        amount=2 * side**3,
        tiles=_num_tiles(side, side),
        launches=MATMUL_LAUNCHES,
    )


def _attention(tokens: int, device: torch.device) -> list[Probe]:
    batch, heads, width = 16, 16, 64
    query, key, value = (
        torch.randn(batch, heads, tokens, width, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    flops = 4 * batch * heads * tokens**2 * width
    return [
        Probe(
            name="attention",
            run=lambda: functional.scaled_dot_product_attention(query, key, value),
            kind=KernelKind.ATTENTION,
            dtype="bfloat16",
            amount=flops,
            tiles=_num_tiles(tokens, 1, batch * heads),
        ),
        Probe(
            name="batched product",
            run=lambda: torch.matmul(query, key.transpose(2, 3)),
            kind=KernelKind.BATCHED_MATMUL,
            dtype="bfloat16",
            amount=flops // 2,
            tiles=_num_tiles(tokens, tokens, batch * heads),
        ),
    ]


def _num_tiles(rows: int, columns: int, batch: int = 1) -> int:
    return batch * -(-rows // TILE) * -(-columns // TILE)


def _addition(name: str, num_bytes: int, device: torch.device, launches: int = 1) -> Probe:
    left, right, total = (torch.ones(num_bytes // 12, device=device) for _ in range(3))
    return Probe(name=name, run=lambda: torch.add(left, right, out=total), amount=12 * left.numel(), launches=launches)


def _fixed_times(gpu: Gpu, device: torch.device, sheet: DeviceProfile) -> tuple[int, int]:
    """Return the nanoseconds of an almost empty kernel, and of a hand-over."""
    value = torch.zeros(1, device=device)
    nothing = Probe(name="nothing", run=lambda: value.add_(1))
    halves = _halves(sheet)
    if halves is None:
        return _chain(gpu, nothing, [None]) // CHAIN, sheet.handover_ns
    one, other = halves
    alone, alternating = _chain(gpu, nothing, [one]), _chain(gpu, nothing, [one, other])
    return alone // CHAIN, max(0, alternating - alone) // (CHAIN - 1)


def _chain(gpu: Gpu, probe: Probe, lanes: Sequence[Lane | None]) -> int:
    """Return the nanoseconds of a chain of kernels that alternates between lanes."""
    timers: dict[str, tuple[Event, Event]] = {}

    def work(origin: Stream) -> None:
        streams = [origin if lane is None else gpu.lane_stream(lane) or origin for lane in lanes]
        others = [stream for stream in streams if stream is not origin]
        timers[probe.name] = begin, end = gpu.new_timer(), gpu.new_timer()
        with forked(gpu, origin, others):
            gpu.record(begin, streams[0])
            for number in range(CHAIN):
                stream = streams[number % len(streams)]
                if number and len(streams) > 1:
                    order_after(gpu, [streams[(number - 1) % len(streams)]], [stream])
                gpu.call(probe, [], stream)
            gpu.record(end, stream)

    return _replayed(gpu, work, timers)[probe.name]


def _slowdown(
    gpu: Gpu, halves: tuple[Lane, Lane] | None, probes: Sequence[Probe]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the slowdown factors of (arithmetic, memory) beside (arithmetic, memory)."""
    if halves is None:
        return ((1.0, 1.0), (1.0, 1.0))
    own, other = halves

    def factor(mine: Probe, its: Probe) -> float:
        alone, its_own = time_on(gpu, own, [mine])[mine.name], time_on(gpu, other, [its])[its.name]
        rounds = NEIGHBOUR_ROUNDS * -(-mine.all_launches * alone // its_own)
        return round(max(1.0, time_on(gpu, own, [mine], (other, its), rounds)[mine.name] / alone), 3)

    matmuls = [probe for probe in probes if (probe.kind, probe.dtype) == (KernelKind.MATMUL, "bfloat16")]
    arithmetic = max(matmuls, key=lambda probe: probe.amount)
    memory = next(probe for probe in probes if probe.name == _STREAMED)
    return (
        (factor(arithmetic, arithmetic), factor(arithmetic, memory)),
        (factor(memory, arithmetic), factor(memory, memory)),
    )


# --------------------------------------------------------------------------------------------------------- profile


def _make_profile(
    sheet: DeviceProfile,
    name: str,
    probes: Sequence[Probe],
    times: Mapping[int, Mapping[str, int]],
    *,
    kernel_ns: int,
    handover_ns: int,
    slowdown: tuple[tuple[float, float], tuple[float, float]],
) -> DeviceProfile:
    """Return the profile whose roofline reproduces the measured times."""
    counts = sorted(times)
    unit_counts = tuple(counts if counts[0] == 1 else [1, *counts])

    def rate(probe: Probe, count: int) -> float:
        work_ns = max(1, times[count][probe.name] - kernel_ns) * wave_efficiency(probe.tiles, count)
        measured = probe.amount / work_ns * NS_PER_S
        if probe.kind is None:
            return measured
        # a split-K matmul uses more SMs than it has tiles, so its rate would be too high for larger ones
        return min(measured, sheet.flops_per_s(probe.kind, probe.dtype, probe.amount, count))

    def rates(probe: Probe) -> tuple[float, ...]:
        per_s = [rate(probe, count) for count in counts]
        first = [] if counts[0] == 1 else [per_s[0] / counts[0]]
        return tuple(float(f"{value:.4g}") for value in [*first, *per_s])

    def at_counts(table: Sequence[Rate]) -> tuple[Rate, ...]:
        return tuple(
            Rate(size=each.size, per_s=tuple(rate_at([each], sheet.unit_counts, each.size, n) for n in unit_counts))
            for each in table
        )

    by_name = {probe.name: probe for probe in probes}
    measured: dict[tuple[KernelKind, str], tuple[Rate, ...]] = {}
    for probe in sorted(probes, key=lambda probe: probe.amount):
        if probe.kind is not None:
            table = measured.get((probe.kind, probe.dtype), ())
            measured[probe.kind, probe.dtype] = (*table, Rate(size=probe.amount, per_s=rates(probe)))
    cached, streamed = by_name[_CACHED], by_name[_STREAMED]
    return replace(
        sheet,
        name=name,
        source="measured",
        unit_counts=unit_counts,
        arithmetic=tuple(
            Arithmetic(
                kind=table.kind,
                dtype=table.dtype,
                rates=measured.get((table.kind, table.dtype)) or at_counts(table.rates),
            )
            for table in sheet.arithmetic
        ),
        near_bytes_per_s=(
            Rate(size=cached.amount, per_s=rates(cached)),
            Rate(size=streamed.amount, per_s=rates(streamed)),
        ),
        far_bytes_per_s=(Rate(size=1, per_s=rates(streamed)),),
        kernel_ns=kernel_ns,
        launch_ns=0,
        handover_ns=handover_ns,
        slowdown=slowdown,
        notes=(
            f"measured on lanes of {', '.join(map(str, counts))} SMs: {', '.join(by_name)}, hand-overs, neighbours",
            f"as in the profile of {sheet.name}: arithmetic of every other kind and type of elements",
            f"products of float32 at torch's float32_matmul_precision {torch.get_float32_matmul_precision()!r}",
        ),
    )
