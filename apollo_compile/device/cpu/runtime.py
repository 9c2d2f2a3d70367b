"""Microbenchmarks of the runtime: bodies compiled by Inductor, run on lanes as segments are.

    RuntimePrograms(units, counts).run();  .fixed_times() -> RuntimeTimes;  .loops(times) -> probes

They measure the cost of calling a body, of each tensor, and of a kernel whose code is in no cache; the speed of fused
loops; the time of a hand-over; and the interference between lanes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.device.cpu.execute import Executable
from apollo_compile.device.cpu.probes import Probe
from apollo_compile.ir import KernelKind, Lane, LaneId, Span
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.trials import TrialStep, write_program

_MEMORY_BYTES = 16 * 2**20
"""Size of a vector that fits into no cache near a core."""

_EVICT_BYTES = 2**21
"""Size of a vector that evicts as much code from the caches near a core as a step of a small model."""

_LOOP_ELEMENTS = (2**13, 2**16)
"""Sizes of the fused loops: one in which the start of a thread team dominates, and a longer one."""

_LOOP_FLOPS = 8 + 12 + 20
"""Per element: multiplications and additions, an exponential, an error function."""

_LAUNCHED = ("small", "wide", "chain")
"""Bodies that the fixed times are computed from."""

_NEIGHBOURS = ("arithmetic", "memory")
"""Bodies that run concurrently."""

_CHAIN = 8
"""Matmuls in the body with many kernels; each is followed by a loop."""

_WIDTH = 16
"""Number of inputs, and of outputs, of the wide body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeTimes:
    """Fixed times in nanoseconds, and slowdown factors."""

    kernel_ns: float
    cold_ns: float
    launch_ns: float
    tensor_ns: float
    handover_ns: float
    slowdown: tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """A compiled body with its inputs."""

    compiled: CompiledBody
    inputs: tuple[torch.Tensor, ...]
    num_outputs: int


def _compile_test_bodies() -> dict[str, _Body]:
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

    def loop(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        density = torch.exp(value * value * -0.5) * 0.3989
        return (value * density + 0.5 * (1 + torch.erf(value * 0.7071)),)

    matrix, large = torch.eye(16), torch.eye(256)
    plans: list[tuple[str, Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = [
        ("small", wide, (torch.ones(16),)),
        ("wide", wide, tuple(torch.ones(16) for _ in range(_WIDTH))),
        ("chain", chain, (matrix, matrix.clone())),
        ("arithmetic", multiply, (large, large.clone())),
        ("memory", wide, (torch.ones(_MEMORY_BYTES // 4),)),
        ("evict", wide, (torch.ones(_EVICT_BYTES // 4),)),
        *((f"loop of {elements}", loop, (torch.rand(elements),)) for elements in _LOOP_ELEMENTS),
    ]
    graphs = [make_fx(function, tracing_mode="fake")(*inputs) for _, function, inputs in plans]
    fakes = [[node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"] for graph in graphs]
    pieces = [(name, graph, fake) for (name, _, _), graph, fake in zip(plans, graphs, fakes, strict=True)]
    with torch.no_grad():
        bodies = compile_bodies(pieces, native=True, is_inference=True, is_backward=False, graph_id=0)
    return {
        name: _Body(compiled=body, inputs=inputs, num_outputs=_WIDTH if name == "wide" else 1)
        for (name, _, inputs), body in zip(plans, bodies, strict=True)
    }


class _Trial:
    """A program of bodies on lanes; steps of one lane run in order."""

    def __init__(
        self,
        bodies: dict[str, _Body],
        steps: Sequence[tuple[str, int]],
        lanes: tuple[Lane, ...],
        *,
        after: Callable[[int], int] | None = None,
    ) -> None:
        """Load it; `after` returns the step that a step, except the first, waits for on any lane."""
        names = list(dict.fromkeys(name for name, _ in steps))
        self._inputs: list[torch.Tensor] = []
        reads = {}
        for name in names:
            inputs = bodies[name].inputs
            reads[name] = tuple(range(len(self._inputs), len(self._inputs) + len(inputs)))
            self._inputs += inputs
        written = [
            TrialStep(
                body=names.index(name),
                reads=reads[name],
                lane=min(lane, len(lanes) - 1),  # all units are one lane
                makes=bodies[name].num_outputs,
                after=() if after is None or place == 0 else (after(place),),
            )
            for place, (name, lane) in enumerate(steps)
        ]
        graph, program = write_program(
            "calibration", written, lanes, num_inputs=len(self._inputs), owners_release=False
        )
        compiled = [bodies[name].compiled for name in names]
        self._executable = Executable(program, graph, compiled, mutates=False, park_team=True)
        self.runs: list[list[Span]] = []
        """Spans of every run, by step."""

    def run(self) -> None:
        """Run twice, since the first run warms the caches; keep the spans of the second."""
        for _ in range(2):
            self._executable.run(list(self._inputs))
        self.runs.append(sorted(self._executable.trace().spans, key=lambda span: span.segment))


def _lanes_of(units: int, first: int) -> tuple[Lane, ...]:
    """Return a lane of all units, a lane of the first `first` units, and a lane of the rest; only lane 0 if no rest."""
    ranges = [range(units), range(first), range(first, units)]
    chosen = ranges[: 1 if first == units else 3]
    return tuple(Lane(id=LaneId(index), units=tuple(each)) for index, each in enumerate(chosen))


class RuntimePrograms:
    """Programs of test bodies, and the times computed from their runs."""

    def __init__(self, units: int, counts: Sequence[int]) -> None:
        """Compile the programs; loops run on every number of units in `counts`."""
        bodies = _compile_test_bodies()
        # Each body runs three times in a row, after the other bodies: the first time its code is cold.
        launches = [(name, 1) for body in _LAUNCHED for name in ("evict", body, body, body)]
        self._launches = _Trial(bodies, launches, _lanes_of(units, 1))
        self._loops = {
            (elements, count): _Trial(bodies, [(f"loop of {elements}", 1)] * 3, _lanes_of(units, count))
            for elements in _LOOP_ELEMENTS
            for count in counts
        }
        self._alternating: list[_Trial] = []
        self._beside: dict[tuple[str, str | None], _Trial] = {}
        if units > 1:
            halves = _lanes_of(units, -(-units // 2))
            for lane in (0, 2):  # a lane that shares units with lane 1, and one that does not
                steps = [("arithmetic", 1), ("small", lane)] * 3
                self._alternating.append(_Trial(bodies, steps, halves, after=lambda step: step - 1))
            for own, other in itertools.product(_NEIGHBOURS, (None, *_NEIGHBOURS)):
                steps = [] if other is None else [(other, 2)]
                steps += [(own, 1)] * 3 + [(other, 2) for _ in range(8) if other is not None]
                self._beside[own, other] = _Trial(bodies, steps, halves, after=lambda step: 0)

    def run(self) -> None:
        """Run all programs once."""
        for program in (self._launches, *self._loops.values(), *self._alternating, *self._beside.values()):
            program.run()

    def fixed_times(self) -> RuntimeTimes:
        """Return the costs of launches, tensors, kernels, hand-overs and neighbours, from medians over all rounds."""
        cold: dict[str, list[int]] = defaultdict(list)
        warm: dict[str, list[int]] = defaultdict(list)
        for spans in self._launches.runs:
            durations = _durations(spans)
            for body, place in zip(_LAUNCHED, range(0, len(durations), 4), strict=True):
                cold[body].append(durations[place + 1])
                warm[body] += durations[place + 2 : place + 4]
        small, wide, chain = (median_high(warm[body]) for body in _LAUNCHED)
        tensor_ns = max(0.0, (wide - small) / (2 * _WIDTH - 2))
        kernel_ns = max(1.0, (chain - small - tensor_ns) / (2 * _CHAIN - 1))
        waits = [
            [
                later.start_ns - earlier.end_ns
                for spans in program.runs
                for earlier, later in zip(spans[::2], spans[1::2], strict=True)
            ]
            for program in self._alternating
        ]
        return RuntimeTimes(
            kernel_ns=kernel_ns,
            cold_ns=max(0.0, (median_high(cold["chain"]) - chain) / (2 * _CHAIN)),
            launch_ns=max(0.0, small - 2 * tensor_ns - kernel_ns),
            tensor_ns=tensor_ns,
            handover_ns=max(map(median_high, waits), default=0.0),  # the planner has one number
            slowdown=self._slowdown(),
        )

    def loops(self, fixed: RuntimeTimes) -> list[Probe]:
        """Return the loops with their times, without the cost of calling a body."""
        probes: dict[int, Probe] = {}
        for (elements, count), trial in self._loops.items():
            probe = probes.setdefault(
                elements,
                Probe(kind=KernelKind.LOOP, flops=_LOOP_FLOPS * elements, near_bytes=8 * elements, is_parallel=True),
            )
            call_ns = fixed.launch_ns + 2 * fixed.tensor_ns
            probe.times[count] = [max(1.0, ns - call_ns) for spans in trial.runs for ns in _durations(spans[1:])]
        return list(probes.values())

    def _slowdown(self) -> tuple[tuple[float, float], tuple[float, float]]:
        if not self._beside:
            return ((1.0, 1.0), (1.0, 1.0))
        times = {
            pair: median_high([time for spans in program.runs for time in _beside(spans) or _durations(spans, lane=1)])
            for pair, program in self._beside.items()
        }

        def factor(own: str, other: str) -> float:
            return round(max(1.0, times[own, other] / times[own, None]), 3)

        arithmetic, memory = _NEIGHBOURS
        return (
            (factor(arithmetic, arithmetic), factor(arithmetic, memory)),
            (factor(memory, arithmetic), factor(memory, memory)),
        )


def _durations(spans: Sequence[Span], lane: int | None = None) -> list[int]:
    return [span.end_ns - span.start_ns for span in spans if lane is None or span.lane == lane]


def _beside(spans: Sequence[Span]) -> list[int]:
    """Return the durations of the segments on lane 1 that ended while lane 2, if used, was still running.

    The list is empty if another process occupied the core of one of the lanes.
    """
    last = max((span.end_ns for span in spans if span.lane == 2), default=None)
    return _durations([span for span in spans if last is None or span.end_ns <= last], lane=1)
