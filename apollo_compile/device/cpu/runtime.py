"""Microbenchmarks of the runtime, and of kernels that only Inductor generates.

    RuntimePrograms(units, counts).run();  .fixed_times() -> RuntimeTimes;  .samples(times) -> samples

Bodies run as segments do. They measure the cost of calling a body, of each tensor, and of a kernel whose code is in no
cache; the speed of fused loops and convolutions; the time of a hand-over; and the interference between lanes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.device.cpu.probes import Probe, Sample, typical
from apollo_compile.device.cpu.trials import TrialBody, TrialProgram, Waits, lanes_of
from apollo_compile.ir import KernelKind, Span
from apollo_compile.torch_bridge.bodies import compile_bodies

_MEMORY_BYTES = 16 * 2**20
"""Size of a vector that fits into no cache near a core."""

_EVICT_BYTES = 2**21
"""Size of a vector that evicts as much code from the caches near a core as a step of a small model."""

_LOOP_ELEMENTS = (2**13, 2**16)
"""Sizes of the fused loops: one in which the start of a thread team dominates, and a longer one."""

_CONVOLUTIONS = ((4, 64, 64), (8, 128, 256))
"""Number of images, their side in pixels, and output channels."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CompiledProbe:
    """A kernel measured as a body, because Inductor generates it, or changes the layout of its inputs."""

    name: str
    probe: Probe
    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]


def _loop_probe(elements: int) -> _CompiledProbe:
    """Return a probe of a loop with the arithmetic of GELU's gradient."""

    def loop(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        density = torch.exp(value * value * -0.5) * 0.3989
        return (value * density + 0.5 * (1 + torch.erf(value * 0.7071)),)

    flops = (8 + 12 + 20) * elements  # multiplications and additions, an exponential, an error function
    probe = Probe(kind=KernelKind.LOOP, flops=flops, near_bytes=8 * elements, is_parallel=True, call=_do_nothing)
    return _CompiledProbe(name=f"loop of {elements}", probe=probe, function=loop, inputs=(torch.rand(elements),))


def _convolutions(images: int, side: int, channels: int) -> list[_CompiledProbe]:
    """Return probes of a convolution with 16 x 16 patches, and of its weight gradient."""
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
            probe=Probe(kind=kind, flops=flops, near_bytes=num_bytes, call=_do_nothing),
            function=function,
            inputs=inputs,
        )
        for kind, function, inputs in (
            (KernelKind.CONVOLUTION, convolve, (image, weight)),
            (KernelKind.CONVOLUTION_BACKWARD, differentiate, (out, image, weight)),
        )
    ]


def _do_nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeTimes:
    """Fixed times in nanoseconds, and slowdown factors."""

    kernel_ns: float
    cold_ns: float
    launch_ns: float
    tensor_ns: float
    handover_ns: float
    slowdown: tuple[tuple[float, float], tuple[float, float]]


_LAUNCHED = ("small", "wide", "chain")
"""Bodies that the fixed times are computed from."""

_NEIGHBOURS = ("arithmetic", "memory")
"""Bodies that run concurrently."""

_CHAIN = 8
"""Matmuls in the body with many kernels; each is followed by a loop."""

_WIDTH = 16
"""Number of inputs, and of outputs, of the wide body."""


def _compile_trial_bodies(probes: Sequence[_CompiledProbe]) -> dict[str, TrialBody]:
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
        name: TrialBody(body=body, inputs=inputs, num_outputs=width)
        for (name, _, inputs), body, width in zip(plans, bodies, widths, strict=True)
    }


class RuntimePrograms:
    """Programs of test bodies, and the times computed from their runs."""

    def __init__(self, units: int, counts: Sequence[int]) -> None:
        """Compile the programs; kernels run on every number of units in `counts`."""
        self._counts = tuple(counts)
        self._compiled = [
            *map(_loop_probe, _LOOP_ELEMENTS),
            *itertools.chain(*(_convolutions(*c) for c in _CONVOLUTIONS)),
        ]
        bodies = _compile_trial_bodies(self._compiled)
        # Each body runs three times in a row, after the other bodies: the first time its code is cold.
        launches = [(name, 1) for probe in _LAUNCHED for name in ("evict", probe, probe, probe)]
        self._launches = TrialProgram(bodies, launches, lanes_of(units, 1))
        self._kernels = {
            (compiled.name, count): TrialProgram(bodies, [(compiled.name, 1)] * 3, lanes_of(units, count))
            for compiled in self._compiled
            for count in counts
        }
        self._alternating: list[TrialProgram] = []
        self._beside: dict[tuple[str, str | None], TrialProgram] = {}
        if units > 1:
            halves = lanes_of(units, -(-units // 2))
            for lane in (0, 2):  # a lane that shares units with lane 1, and one that does not
                steps = [("arithmetic", 1), ("small", lane)] * 3
                self._alternating.append(TrialProgram(bodies, steps, halves, waits=Waits.FOR_PREVIOUS))
            for own, other in itertools.product(_NEIGHBOURS, (None, *_NEIGHBOURS)):
                steps = [] if other is None else [(other, 2)]
                steps += [(own, 1)] * 3 + [(other, 2) for _ in range(8) if other is not None]
                self._beside[own, other] = TrialProgram(bodies, steps, halves, waits=Waits.FOR_FIRST)

    def run(self) -> None:
        """Run all programs once."""
        for program in (self._launches, *self._kernels.values(), *self._alternating, *self._beside.values()):
            program.run()

    def fixed_times(self) -> RuntimeTimes:
        """Return the costs of launches, tensors, kernels, hand-overs and neighbours, from medians over all rounds."""
        cold: dict[str, list[int]] = defaultdict(list)
        warm: dict[str, list[int]] = defaultdict(list)
        for spans in self._launches.runs:
            durations = [span.end_ns - span.start_ns for span in spans]
            for probe, place in zip(_LAUNCHED, range(0, len(durations), 4), strict=True):
                cold[probe].append(durations[place + 1])
                warm[probe] += durations[place + 2 : place + 4]
        small, wide, chain = (typical(warm[probe]) for probe in _LAUNCHED)
        tensor_ns = max(0.0, (wide - small) / (2 * _WIDTH - 2))
        kernel_ns = max(1.0, (chain - small - tensor_ns) / (2 * _CHAIN - 1))
        return RuntimeTimes(
            kernel_ns=kernel_ns,
            cold_ns=max(0.0, (typical(cold["chain"]) - chain) / (2 * _CHAIN)),
            launch_ns=max(0.0, small - 2 * tensor_ns - kernel_ns),
            tensor_ns=tensor_ns,
            handover_ns=self._handover_ns(),
            slowdown=self._slowdown(),
        )

    def disturbed_share(self) -> float:
        """Return the share of neighbour runs in which one lane had ended before the other began."""
        runs = [spans for program in self._beside.values() for spans in program.runs]
        return sum(not _times_beside(spans) for spans in runs) / max(1, len(runs))

    def samples(self, fixed: RuntimeTimes) -> list[Sample]:
        """Return the times of the compiled kernels, without the cost of calling their bodies."""
        samples = []
        for compiled in self._compiled:
            call_ns = fixed.launch_ns + fixed.tensor_ns * (len(compiled.inputs) + 1)
            times = {}
            for count in self._counts:
                runs = self._kernels[compiled.name, count].runs
                durations = [span.end_ns - span.start_ns for spans in runs for span in spans[1:]]
                times[count] = max(1.0, typical(durations) - call_ns)
            samples.append(Sample(probe=compiled.probe, times=times))
        return samples

    def _handover_ns(self) -> float:
        """Return the longest hand-over between any kinds of lanes, since the planner has one number."""
        longest = 0.0
        for program in self._alternating:
            pairs = [pair for spans in program.runs for pair in zip(spans[::2], spans[1::2], strict=True)]
            longest = max(longest, typical([later.start_ns - earlier.end_ns for earlier, later in pairs]))
        return longest

    def _slowdown(self) -> tuple[tuple[float, float], tuple[float, float]]:
        if not self._beside:
            return ((1.0, 1.0), (1.0, 1.0))
        times = {
            pair: typical([time for spans in program.runs for time in _times_beside(spans) or _times_on(1, spans)])
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
    """Return the durations of the segments on lane 1 that ended while lane 2, if used, was still running.

    The list is empty if another process occupied the core of one of the lanes.
    """
    last = max((span.end_ns for span in spans if span.lane == 2), default=None)
    return _times_on(1, [span for span in spans if last is None or span.end_ns <= last])
