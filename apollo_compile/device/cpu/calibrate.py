"""Measure this machine: microbenchmarks -> DeviceProfile.

    calibrate(units, progress=...) -> Calibration (the profile, and whether other processes disturbed the measurement)

Three things are measured, for one unit, for all units and for every number of units in the lane catalogue:

runtime     Bodies compiled by Inductor, run by the native runtime as segments are: what calling a body costs, what
            every tensor adds, what a kernel adds whose code is in no cache, how fast a fused loop computes, how long
            a hand-over between lanes takes.
kernels     Calls of torch that segments consist of, small to large: matrix products, attention, convolutions, loops
            over vectors that are in the cache (near) or not (far), scatters. Rates are what is left of a call's time
            beyond fixed times and bytes, so that the roofline gives the time that was measured.
neighbours  The same runtime with one half of the units multiplying matrices or copying memory, beside the other half
            doing the one or the other.

On a shared machine the same code takes up to twice as long from one moment to the next. So rounds go over everything
in turn instead of repeating one thing, and of the times in all rounds the median counts, as it does of the steps that
are predicted. Rounds in which the process got less CPU time than its threads should have had are another process's
doing; if they are many, the calibration says so.

All regions of OpenMP run on the calling thread: a second team beside the first one slows both down for good.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.device.cpu.discover import LEAST_CPU_SHARE
from apollo_compile.device.cpu.execute import Executable, keep_memory, most_units
from apollo_compile.device.cpu.machine import cpu_model
from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.device.profile import Arithmetic, DeviceProfile, Rate, rate_at
from apollo_compile.device.target import CompiledBody
from apollo_compile.ir import (
    Assignment,
    BodyId,
    Buffer,
    BufferId,
    KernelKind,
    Lane,
    LaneId,
    Origin,
    Plan,
    Quota,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Span,
    Work,
)
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.sync import eliminate_syncs
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.units import NS_PER_S

Call: TypeAlias = Callable[[], object]
Progress: TypeAlias = Callable[[str, int, int], None]
"""What is being done, how many steps are done, and how many there are."""

ROUNDS = 100
"""Rounds over everything."""

_BATCH_NS = 300_000
"""A shorter call is repeated inside a round."""

_TURN_NS = 4_000_000
"""A longer call takes part in some rounds only."""

_WITNESS_SIDE = 512
"""Rows and columns of a matrix product that uses every core for a while."""

_MOST_DISTURBED = 0.5
"""Share of disturbed rounds above which a profile is not worth keeping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A measured profile."""

    profile: DeviceProfile
    disturbed_share: float
    """Share of the rounds, or of the runs of neighbours, in which other processes held a core."""

    @property
    def is_disturbed(self) -> bool:
        """Whether so many rounds were disturbed that the profile should not be kept."""
        return self.disturbed_share > _MOST_DISTURBED


def calibrate(units: int, *, rounds: int = ROUNDS, progress: Progress = lambda what, done, total: None) -> Calibration:
    """Measure this machine with `units` units, in less than two minutes; no other work should run.

    Arguments:
        units: cores to use.
        rounds: over everything; with fewer than the default, a neighbour of a moment shows in the profile.
        progress: called before every step.

    Raises:
        ValueError: torch has fewer threads, or the process fewer cores, than `units`.
    """
    if not 1 <= units <= most_units():
        raise ValueError(
            f"cannot calibrate {units} units: choose 1 to {most_units()}, the cores that torch can use here"
        )
    keep_memory()
    threads = torch.get_num_threads()
    steps = _Steps(progress, total=rounds + 2)
    steps.begin("compiling test segments")
    runtime = _RuntimePrograms(units)
    probes = [_TimedProbe(probe, _unit_counts(units)) for probe in _make_probes()]
    disturbed = 0
    with torch.no_grad():
        for number in range(rounds):
            steps.begin("measuring")
            runtime.run()
            for count in _unit_counts(units):
                torch.set_num_threads(count)
                disturbed += _cpu_share() < LEAST_CPU_SHARE * count
                for probe in probes:
                    probe.time(number, count)
            torch.set_num_threads(threads)
    steps.begin("done")
    times = runtime.fixed_times()
    samples = [*(probe.sample() for probe in probes), *runtime.samples(times)]
    return Calibration(
        profile=_make_profile(units, samples, times),
        disturbed_share=max(disturbed / (rounds * len(_unit_counts(units))), runtime.disturbed_share()),
    )


def _unit_counts(units: int) -> list[int]:
    """Return the numbers of units to measure."""
    return sorted({1, *(len(lane.units) for lane in lane_catalogue(units))})


class _Steps:
    """Counts steps for the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def begin(self, what: str) -> None:
        self._progress(what, self._done, self._total)
        self._done += 1


def _do_nothing() -> None:
    return None


def _typical(times: Sequence[float]) -> float:
    """Return the median."""
    return sorted(times)[len(times) // 2]


# --------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Probe:
    """A call that stands for one kernel, or for several of one size."""

    kind: KernelKind
    flops: int = 0
    """Of one kernel."""
    near_bytes: int = 0
    far_bytes: int = 0
    footprint: int = 0
    """Bytes that are touched before the far bytes are read again."""
    dtype: str = "float32"
    kernels: int = 1
    is_parallel: bool = False
    """Whether its time tells what going parallel costs."""
    call: Call
    """Does nothing where the kernel is a compiled body."""

    @property
    def bytes_moved(self) -> int:
        return self.near_bytes + self.far_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A probe and the nanoseconds of one of its kernels, by number of units."""

    probe: _Probe
    times: dict[int, float]


def _make_probes() -> list[_Probe]:
    probes = [_near_probe(kib) for kib in (48, 192, 768, 3072, 12288, 49152, 196608)]
    probes += [_far_probe(mib) for mib in (2, 4, 16, 64)]
    probes += [_matmul_probe(size, torch.float32) for size in (16, 32, 64, 128, 256, 512)]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        probes += [_matmul_probe(size, dtype) for size in (32, 128, 256)]
    probes += [_batched_probe(*shape) for shape in ((32, 16), (64, 32), (64, 64), (32, 128))]
    for shape in ((2, 2, 16, 16), (4, 4, 32, 16), (4, 4, 64, 32), (8, 4, 128, 64)):
        probes += _attention_probes(*shape)
    probes += [_scatter_probe(rows) for rows in (64, 1024)]
    probes += [_scan_probe(columns) for columns in (16, 1024)]
    return probes


def _near_probe(kib: int) -> _Probe:
    count = kib * 1024 // 12
    left, right, total = torch.ones(count), torch.ones(count), torch.empty(count)
    return _Probe(kind=KernelKind.LOOP, near_bytes=12 * count, call=lambda: torch.add(left, right, out=total))


def _far_probe(mib: int) -> _Probe:
    """Reads other vectors at every call, and comes back to them after `mib` MiB of others."""
    count = 2**16  # torch gives shorter vectors to one thread
    pairs = itertools.cycle([(torch.ones(count), torch.ones(count)) for _ in range(mib * 2**20 // (8 * count))])
    total = torch.empty(count)

    def call() -> None:
        left, right = next(pairs)
        torch.add(left, right, out=total)

    return _Probe(kind=KernelKind.LOOP, near_bytes=4 * count, far_bytes=8 * count, footprint=mib * 2**20, call=call)


def _matmul_probe(size: int, dtype: torch.dtype) -> _Probe:
    """A layer's product with its bias, and the product of its weight's gradient, half of each."""
    values, weight, total = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    bias, transposed, weight_transposed = torch.ones(size, dtype=dtype), values.t(), weight.t()

    def call() -> None:
        torch.addmm(bias, values, weight_transposed, out=total)
        torch.mm(transposed, weight, out=total)

    return _Probe(
        kind=KernelKind.MATMUL,
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * size**3,
        near_bytes=3 * size**2 * dtype.itemsize,
        kernels=2,
        call=call,
    )


def _batched_probe(batch: int, size: int) -> _Probe:
    left, right, total = (torch.ones(batch, size, size) for _ in range(3))
    return _Probe(
        kind=KernelKind.BATCHED_MATMUL,
        flops=2 * batch * size**3,
        near_bytes=12 * batch * size**2,
        call=lambda: torch.bmm(left, right, out=total),
    )


def _attention_probes(batch: int, heads: int, tokens: int, width: int) -> list[_Probe]:
    shape = (batch, heads, tokens, width)
    query, key, value = torch.ones(shape), torch.ones(shape), torch.ones(shape)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    run_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, logsumexp = run(query, key, value)
    flops, num_bytes = 4 * batch * heads * tokens**2 * width, 4 * query.numel()
    return [
        _Probe(kind=KernelKind.ATTENTION, flops=flops, near_bytes=4 * num_bytes, call=lambda: run(query, key, value)),
        _Probe(
            kind=KernelKind.ATTENTION_BACKWARD,
            flops=flops * 5 // 2,
            near_bytes=8 * num_bytes,
            call=lambda: run_backward(query, query, key, value, out, logsumexp, 0.0, False),
        ),
    ]


def _scatter_probe(rows: int) -> _Probe:
    """Adds rows of gradients to those of an embedding."""
    table, gradient, indices = torch.zeros(1000, 64), torch.ones(rows, 64), torch.arange(rows) % 997
    return _Probe(
        kind=KernelKind.SCATTER,
        flops=gradient.numel(),
        near_bytes=8 * gradient.numel(),
        call=lambda: torch.ops.aten.index_put_(table, [indices], gradient, True),
    )


def _scan_probe(columns: int) -> _Probe:
    values = torch.ones(64, columns)
    return _Probe(
        kind=KernelKind.LIBRARY,
        flops=values.numel(),
        near_bytes=8 * values.numel(),
        call=lambda: torch.cumsum(values, 1),
    )


class _TimedProbe:
    """A probe and its times in all rounds."""

    def __init__(self, probe: _Probe, counts: Sequence[int]) -> None:
        with torch.no_grad():
            self._expected_ns = _expect(probe.call)
        self._probe = probe
        self._times: dict[int, list[float]] = {count: [] for count in counts}

    def time(self, number: int, units: int) -> None:
        """Take part in a round, unless the call is so long that it takes part in some only."""
        if number % max(1, round(self._expected_ns / _TURN_NS)) == 0:
            elapsed_ns = _time(self._probe.call, max(1, round(_BATCH_NS / self._expected_ns)))
            self._times[units].append(elapsed_ns / self._probe.kernels)

    def sample(self) -> _Sample:
        times = {units: _typical(found) for units, found in self._times.items()}
        return _Sample(probe=self._probe, times=times)


def _cpu_share() -> float:
    """Return the CPU time that large products get, over wall time: as many cores as torch may use, if they are free."""
    values = torch.ones(_WITNESS_SIDE, _WITNESS_SIDE)
    total = torch.mm(values, values)
    begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(2):
        torch.mm(values, values, out=total)
    return (time.process_time_ns() - cpu_begin) / (time.perf_counter_ns() - begin)


def _expect(call: Call) -> float:
    """Return about how long a call takes."""
    _time(call, 1)  # loads code and touches pages
    return _time(call, 3)


def _time(call: Call, repeats: int) -> float:
    call()  # brings its data back into the caches
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - begin) / repeats


# --------------------------------------------------------------------------------------------------------- runtime

_MEMORY_BYTES = 16 * 2**20
"""Of a vector that no cache near a core holds."""

_EVICT_BYTES = 2**21
"""Of a vector that takes the place of most code in the caches near a core, as a step of a small model does."""

_LOOP_ELEMENTS = (2**13, 2**16)
"""What the bodies with a fused loop work on: short enough for the start of a team to show, and longer."""

_CONVOLUTIONS = ((4, 64, 64), (8, 128, 256))
"""Images, rows and columns of an image, and channels of the result."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CompiledProbe:
    """A kernel that is measured as a body, because Inductor makes it, or changes the layout of what it takes."""

    name: str
    probe: _Probe
    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]


def _loop_probe(elements: int) -> _CompiledProbe:
    """Computes what the gradient of GELU does."""

    def loop(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        density = torch.exp(value * value * -0.5) * 0.3989
        return (value * density + 0.5 * (1 + torch.erf(value * 0.7071)),)

    flops = (8 + 12 + 20) * elements  # products and sums, an exponential, an error function
    probe = _Probe(kind=KernelKind.LOOP, flops=flops, near_bytes=8 * elements, is_parallel=True, call=_do_nothing)
    return _CompiledProbe(name=f"loop of {elements}", probe=probe, function=loop, inputs=(torch.rand(elements),))


def _convolutions(images: int, side: int, channels: int) -> list[_CompiledProbe]:
    """Cuts images into patches of 16 x 16, and finds the gradient of the weight."""
    shape: tuple[Any, ...] = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward.default

    def convolve(image: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.aten.convolution.default(image, weight, None, *shape).sum((2, 3)),)

    def differentiate(out: torch.Tensor, image: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (backward(out, image, weight, [channels], *shape, [False, True, False])[1].sum((2, 3)),)

    image, weight = torch.ones(images, 3, side, side), torch.ones(channels, 3, 16, 16)
    out = torch.ones(images, channels, side // 16, side // 16)
    flops = 2 * out.numel() * weight[0].numel()
    num_bytes = 4 * (image.numel() + weight.numel() + out.numel())
    return [
        _CompiledProbe(
            name=f"{kind} of {side}",
            probe=_Probe(kind=kind, flops=flops, near_bytes=num_bytes, call=_do_nothing),
            function=function,
            inputs=inputs,
        )
        for kind, function, inputs in (
            (KernelKind.CONVOLUTION, convolve, (image, weight)),
            (KernelKind.CONVOLUTION_BACKWARD, differentiate, (out, image, weight)),
        )
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TestBody:
    """A compiled body, and what it takes."""

    body: CompiledBody
    inputs: tuple[torch.Tensor, ...]
    num_outputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Runtime:
    """Fixed times, in nanoseconds."""

    kernel_ns: float
    cold_ns: float
    launch_ns: float
    tensor_ns: float
    handover_ns: float
    slowdown: tuple[tuple[float, float], tuple[float, float]]


_LAUNCHED = ("small", "wide", "chain")
"""Bodies whose times tell what a launch costs."""

_NEIGHBOURS = ("arithmetic", "memory")
"""Bodies that are run beside each other."""

_CHAIN = 8
"""Products in the body that has many kernels; each is followed by a loop."""

_WIDTH = 16
"""Tensors that the wide body takes, and as many that it returns."""


def _compile_test_bodies(probes: Sequence[_CompiledProbe]) -> dict[str, _TestBody]:
    def wide(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value + 1 for value in values)

    def chain(value: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(_CHAIN):
            value = torch.relu(value @ weight)
        return (value,)

    def multiply(value: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(4):
            value = value @ weight
        return (value,)

    matrix, large = torch.eye(16), torch.eye(256)
    plans: list[tuple[str, Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = [
        ("small", wide, (torch.ones(16),)),
        ("wide", wide, tuple(torch.ones(16) for _ in range(_WIDTH))),
        ("chain", chain, (matrix, matrix.clone())),
        ("arithmetic", multiply, (large, large.clone())),
        ("memory", wide, (torch.ones(_MEMORY_BYTES // 4),)),
        ("evict", wide, (torch.ones(_EVICT_BYTES // 4),)),
        *((probe.name, probe.function, probe.inputs) for probe in probes),
    ]
    graphs = [make_fx(function, tracing_mode="fake")(*inputs) for _, function, inputs in plans]
    fakes = [[node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"] for graph in graphs]
    pieces = [(name, graph, fake) for (name, _, _), graph, fake in zip(plans, graphs, fakes, strict=True)]
    widths = [len(function(*inputs)) for _, function, inputs in plans]
    with torch.no_grad():
        bodies = compile_bodies(pieces, native=True, is_inference=True, is_backward=False, graph_id=0)
    return {
        name: _TestBody(body=body, inputs=inputs, num_outputs=width)
        for (name, _, inputs), body, width in zip(plans, bodies, widths, strict=True)
    }


class _RuntimePrograms:
    """Programs of test bodies, and what their runs say about the runtime."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._compiled = [
            *map(_loop_probe, _LOOP_ELEMENTS),
            *itertools.chain(*(_convolutions(*c) for c in _CONVOLUTIONS)),
        ]
        bodies = _compile_test_bodies(self._compiled)
        # Every body runs three times in a row, and the others before it again: the first time its code is cold.
        launches = [(name, 1) for probe in _LAUNCHED for name in ("evict", probe, probe, probe)]
        self._launches = _TestProgram(bodies, launches, _lanes(units, 1))
        self._kernels = {
            (compiled.name, count): _TestProgram(bodies, [(compiled.name, 1)] * 3, _lanes(units, count))
            for compiled in self._compiled
            for count in _unit_counts(units)
        }
        self._in_turns: list[_TestProgram] = []
        self._beside: dict[tuple[str, str | None], _TestProgram] = {}
        if units > 1:
            halves = _lanes(units, -(-units // 2))
            for lane in (0, 2):  # one that shares units with the lane before, one that does not
                steps = [("arithmetic", 1), ("small", lane)] * 3
                self._in_turns.append(_TestProgram(bodies, steps, halves, waits=_Waits.IN_TURNS))
            for own, other in itertools.product(_NEIGHBOURS, (None, *_NEIGHBOURS)):
                steps = [] if other is None else [(other, 2)]
                steps += [(own, 1)] * 3 + [(other, 2) for _ in range(8) if other is not None]
                self._beside[own, other] = _TestProgram(bodies, steps, halves, waits=_Waits.FOR_THE_FIRST)

    def run(self) -> None:
        """Take part in a round."""
        for program in (self._launches, *self._kernels.values(), *self._in_turns, *self._beside.values()):
            program.run()

    def fixed_times(self) -> _Runtime:
        cold: dict[str, list[int]] = defaultdict(list)
        warm: dict[str, list[int]] = defaultdict(list)
        for spans in self._launches.runs:
            durations = [span.end_ns - span.start_ns for span in spans]
            for probe, place in zip(_LAUNCHED, range(0, len(durations), 4), strict=True):
                cold[probe].append(durations[place + 1])
                warm[probe] += durations[place + 2 : place + 4]
        small, wide, chain = (_typical(warm[probe]) for probe in _LAUNCHED)
        tensor_ns = max(0.0, (wide - small) / (2 * _WIDTH - 2))
        kernel_ns = max(1.0, (chain - small - tensor_ns) / (2 * _CHAIN - 1))
        return _Runtime(
            kernel_ns=kernel_ns,
            cold_ns=max(0.0, (_typical(cold["chain"]) - chain) / (2 * _CHAIN)),
            launch_ns=max(0.0, small - 2 * tensor_ns - kernel_ns),
            tensor_ns=tensor_ns,
            handover_ns=self._handover_ns(),
            slowdown=self._slowdown(),
        )

    def disturbed_share(self) -> float:
        """Return the share of runs of neighbours in which one lane had ended before the other began."""
        runs = [spans for program in self._beside.values() for spans in program.runs]
        return sum(not _times_beside(spans) for spans in runs) / max(1, len(runs))

    def samples(self, fixed: _Runtime) -> list[_Sample]:
        """Return the compiled kernels, without what it costs to call their bodies."""
        samples = []
        for compiled in self._compiled:
            call_ns = fixed.launch_ns + fixed.tensor_ns * (len(compiled.inputs) + 1)
            times = {}
            for count in _unit_counts(self._units):
                runs = self._kernels[compiled.name, count].runs
                durations = [span.end_ns - span.start_ns for spans in runs for span in spans[1:]]
                times[count] = max(1.0, _typical(durations) - call_ns)
            samples.append(_Sample(probe=compiled.probe, times=times))
        return samples

    def _handover_ns(self) -> float:
        """Return the longer of both kinds: the planner knows one."""
        longest = 0.0
        for program in self._in_turns:
            pairs = [pair for spans in program.runs for pair in zip(spans[::2], spans[1::2], strict=True)]
            longest = max(longest, _typical([later.start_ns - earlier.end_ns for earlier, later in pairs]))
        return longest

    def _slowdown(self) -> tuple[tuple[float, float], tuple[float, float]]:
        if not self._beside:
            return ((1.0, 1.0), (1.0, 1.0))
        times = {
            pair: _typical([time for spans in program.runs for time in _times_beside(spans) or _times_on(1, spans)])
            for pair, program in self._beside.items()
        }

        def factor(own: str, other: str) -> float:
            return round(max(1.0, times[own, other] / times[own, None]), 3)

        arithmetic, memory = _NEIGHBOURS
        return (
            (factor(arithmetic, arithmetic), factor(arithmetic, memory)),
            (factor(memory, arithmetic), factor(memory, memory)),
        )


def _times_on(lane: int, spans: Sequence[Span]) -> list[int]:
    return [span.end_ns - span.start_ns for span in spans if span.lane == lane]


def _times_beside(spans: Sequence[Span]) -> list[int]:
    """Return the times of the segments on lane 1 that ended while lane 2, if it has any, was still at work.

    There is none if another process held the core of one of the lanes.
    """
    last = max((span.end_ns for span in spans if span.lane == 2), default=None)
    return _times_on(1, [span for span in spans if last is None or span.end_ns <= last])


def _lanes(units: int, first: int) -> tuple[Lane, ...]:
    """Return a lane with all units, then one with the first few, then one with the others; no two are the same."""
    ranges = [range(units), range(first), range(first, units)]
    chosen = [tuple(units) for units in ranges[: 1 if first == units else 3]]
    return tuple(Lane(id=LaneId(index), units=units) for index, units in enumerate(chosen))


class _Waits(Enum):
    """What a step waits for, besides the one before it on its lane."""

    FOR_NOTHING = auto()
    FOR_THE_FIRST = auto()
    """For the first of all, so that lanes do not begin at moments of their own."""
    IN_TURNS = auto()
    """For the one before it."""

    def before(self, step: int) -> tuple[SegmentId, ...]:
        """Return the step, if any, that `step` waits for."""
        if self is _Waits.FOR_NOTHING or step == 0:
            return ()
        return (SegmentId(0 if self is _Waits.FOR_THE_FIRST else step - 1),)


class _TestProgram:
    """Bodies on lanes, run once a round. Steps on one lane run in order; where there is one only, it takes all."""

    def __init__(
        self,
        bodies: dict[str, _TestBody],
        steps: Sequence[tuple[str, int]],
        lanes: tuple[Lane, ...],
        *,
        waits: _Waits = _Waits.FOR_NOTHING,
    ) -> None:
        used = {name: bodies[name] for name, _ in steps}
        chosen = [(name, min(lane, len(lanes) - 1)) for name, lane in steps]
        graph = _make_graph(used, [name for name, _ in chosen], waits=waits)
        plan = _make_plan([lane for _, lane in chosen], lanes)
        syncs = eliminate_syncs(graph, plan)
        program = emit_program(graph, plan, syncs, plan_memory(graph, plan, syncs))
        compiled = [body.body for body in used.values()]
        self._executable = Executable(program, graph, compiled, mutates=False, park_team=True)
        self._inputs = [tensor for body in used.values() for tensor in body.inputs]
        self.runs: list[list[Span]] = []
        """Spans of every run, by step."""

    def run(self) -> None:
        """Run twice, since the first time brings code and data back into the caches; keep the second."""
        for _ in range(2):
            self._executable.run(list(self._inputs))
        self.runs.append(sorted(self._executable.trace().spans, key=lambda span: span.segment))


def _make_plan(chosen: Sequence[int], lanes: tuple[Lane, ...]) -> Plan:
    return Plan(
        origin=Origin.SERIAL,
        lanes=lanes,
        assignments=tuple(
            Assignment(
                segment=SegmentId(step),
                lane=LaneId(lane),
                quota=Quota(units=len(lanes[lane].units), memory_bytes=0),
                start_ns=step,
                duration_ns=1,
            )
            for step, lane in enumerate(chosen)
        ),
        makespan_ns=len(chosen),
        undisturbed_ns=len(chosen),
        serial_ns=len(chosen),
        lower_bound_ns=0,
    )


def _make_graph(bodies: dict[str, _TestBody], steps: Sequence[str], *, waits: _Waits) -> SegmentGraph:
    """Return one segment per step; all steps of a body read the same inputs."""
    names = list(bodies)
    buffers: list[Buffer] = []
    inputs: dict[str, tuple[BufferId, ...]] = {}
    for name in names:
        readers = tuple(SegmentId(step) for step, other in enumerate(steps) if other == name)
        first = len(buffers)
        buffers += [_buffer(first + place, None, readers) for place in range(len(bodies[name].inputs))]
        inputs[name] = tuple(buffer.id for buffer in buffers[first:])
    segments = []
    for step, name in enumerate(steps):
        first = len(buffers)
        buffers += [_buffer(first + place, SegmentId(step), ()) for place in range(bodies[name].num_outputs)]
        segments.append(
            Segment(
                id=SegmentId(step),
                name=f"{name}#{step}",
                module="",
                body=BodyId(names.index(name)),
                inputs=inputs[name],
                outputs=tuple(buffer.id for buffer in buffers[first:]),
                after=waits.before(step),
                work=Work(),
            )
        )
    return SegmentGraph(
        name="calibration",
        role=Role.INFERENCE,
        segments=tuple(segments),
        buffers=tuple(buffers),
        inputs=tuple(buffer for name in names for buffer in inputs[name]),
        outputs=(),
    )


def _buffer(place: int, producer: SegmentId | None, readers: tuple[SegmentId, ...]) -> Buffer:
    return Buffer(
        id=BufferId(place), name=f"b{place}", producer=producer, readers=readers, num_bytes=0, is_output=False
    )


# --------------------------------------------------------------------------------------------------------- profile

_LEAST_SHARE = 0.1
"""Share of a call's time that is its work at least, however long everything else is taken to be."""


def _make_profile(units: int, samples: Sequence[_Sample], runtime: _Runtime) -> DeviceProfile:
    """Choose rates so that the roofline gives the times that were measured."""
    counts = _unit_counts(units)
    waits = [sample.times[units] - sample.times[1] / units for sample in samples if sample.probe.is_parallel]
    parallel_ns = max(0.0, min(waits)) if units > 1 else 0.0

    def rate(sample: _Sample, amount: int, size: int, other_ns: Callable[[int], float]) -> Rate:
        """Return the rate of `amount` in the time that fixed times and `other_ns(units)` leave."""
        per_s = []
        for count in counts:
            fixed_ns = runtime.kernel_ns + (parallel_ns if count > 1 else 0.0) + other_ns(count)
            rest_ns = max(sample.times[count] - fixed_ns, _LEAST_SHARE * sample.times[count])
            per_s.append(float(f"{amount / rest_ns * NS_PER_S:.4g}"))
        return Rate(size=size, per_s=tuple(per_s))

    near: list[Rate] = []

    def near_ns(probe: _Probe) -> Callable[[int], float]:
        return lambda count: probe.near_bytes / rate_at(near, counts, probe.bytes_moved, count) * NS_PER_S

    far: list[Rate] = []
    arithmetic: dict[tuple[KernelKind, str], list[Rate]] = defaultdict(list)
    for sample in samples:  # near bytes come first: the others build on them
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
