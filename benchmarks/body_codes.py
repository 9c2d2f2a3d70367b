"""What all bodies of a training step would gain if each had the code that is the fastest for it, found by measuring.

    python -m benchmarks.body_codes --workloads clip,whisper --batch 4 --json out.json

Per workload, in one process: the model is compiled once per kind of code (`CODES`), cut alike each time, and all
segments run in turn on all units, so that nothing but the code differs. The kinds take turns in training steps, each
after a step of its own that brings its code back into the caches; every other round has them in reverse order. A body's
time is the sum over the segments that share it. Where the machine was slower for a round, its times are divided by how
much longer the kinds took in it than usual (the median over them).

Which kind is the fastest for a body is decided by one half of the rounds, and what that gives measured in the other:
the least of several noisy times is too small, and would be a gain where there is none. Both halves have both orders and
decide once. The gain is the mean of the two; what they differ by says what it is worth.

    native       as apollo compiles bodies: Inductor's C++ wrapper, its own settings
    python       the same kernels, called from Inductor's Python wrapper
    eager        the operators of eager PyTorch, one by one
    contracted   native, with products and sums in one instruction; they round otherwise (a*a - b*b may be less than 0
                 for a = b), so it is measured here and offered nowhere
    narrow       native, with vectors of 256 bits; another kind of code only where the machine has 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from tabulate import tabulate
from tqdm import tqdm

from apollo_compile import backend
from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_MS
from benchmarks.plan_error import find_slowness
from benchmarks.run import batch_sizes, names_of
from benchmarks.workloads import Workload, build
from benchmarks.workloads.specs import SPECS

WARM_ROUNDS = 2
LEAST_ROUNDS = 4
"""Either half has both orders then."""
MOST_KINDS = 64
"""Dynamo's limit for the compiled forms of a function, which many models and graphs share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """One kind of code for bodies."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of apollo."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of Inductor."""


NATIVE = "native"
CODES = (
    Code(name=NATIVE),
    Code(name="python", options={"runtime.bodies": "python"}),
    Code(name="eager", options={"runtime.bodies": "eager"}),
    Code(name="contracted", settings={"cpp.enable_floating_point_contract_flag": "fast"}),
    Code(name="narrow", settings={"cpp.simdlen": 256}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyTimes:
    """One body, and how long all of its segments took together, in nanoseconds."""

    graph: str
    segment: str
    """The first that it is the code of."""
    num_segments: int
    times: Mapping[str, Sequence[float]]
    """By kind of code, one per round; those of a round have the same number."""

    def median(self, code: str, rounds: Sequence[int] | None = None) -> float:
        """Return the usual time with this code, of some rounds or of all."""
        found = self.times[code]
        return statistics.median(found if rounds is None else [found[number] for number in rounds])

    def choose(self, rounds: Sequence[int]) -> str:
        """Return the kind of code that was the fastest in these rounds."""
        return min(self.times, key=lambda code: self.median(code, rounds))


def even_out(bodies: Sequence[BodyTimes]) -> list[BodyTimes]:
    """Return the times as if every round had been as fast as the others."""
    steps = [[sum(taken) for taken in zip(*(b.times[code] for b in bodies), strict=True)] for code in _codes(bodies)]
    slowness = find_slowness([list(enumerate(found)) for found in steps])
    return [
        replace(
            body,
            times={
                code: tuple(taken / slowness[number] for number, taken in enumerate(found))
                for code, found in body.times.items()
            },
        )
        for body in bodies
    ]


def find_gains(bodies: Sequence[BodyTimes]) -> tuple[float, float]:
    """Return how much shorter all bodies become, below 0 longer; either half of the rounds chose, the other measured.

    Raises:
        ValueError: there are fewer than `LEAST_ROUNDS` rounds.
    """
    if _num_rounds(bodies) < LEAST_ROUNDS:
        raise ValueError(f"{_num_rounds(bodies)} rounds cannot be halved, {LEAST_ROUNDS} can: measure more")
    one = [number for number in range(_num_rounds(bodies)) if number // 2 % 2 == 0]
    other = [number for number in range(_num_rounds(bodies)) if number // 2 % 2 == 1]

    def gain(choosing: Sequence[int], measuring: Sequence[int]) -> float:
        chosen = sum(body.median(body.choose(choosing), measuring) for body in bodies)
        return 1 - chosen / sum(body.median(NATIVE, measuring) for body in bodies)

    return gain(one, other), gain(other, one)


def _codes(bodies: Sequence[BodyTimes]) -> Sequence[str]:
    return tuple(bodies[0].times)


def _num_rounds(bodies: Sequence[BodyTimes]) -> int:
    return len(bodies[0].times[NATIVE])


def measure_codes(workload: Workload, codes: Sequence[Code], *, rounds: int) -> list[BodyTimes]:
    """Return the times of all bodies of a training step.

    Raises:
        RuntimeError: nothing was compiled in segments, or the graphs are cut otherwise with one kind of code.
    """
    torch.compiler.reset()  # what was compiled before counts among what Dynamo allows of a function
    runs = {code.name: _compile(workload, code) for code in codes}
    first = next(iter(runs.values()))
    if not first.graphs:
        raise RuntimeError(f"{workload.name}: no graph was compiled in segments, so there are no bodies to time")
    for name, compiled in runs.items():
        if _cuts(compiled) != _cuts(first):
            raise RuntimeError(f"{workload.name}: with {name!r} code, graphs are cut otherwise than with the first")
    times: dict[tuple[int, int], dict[str, list[int]]] = {}
    for turn in tqdm(range(WARM_ROUNDS + rounds), desc=f"   {workload.name}", file=sys.stderr, mininterval=5):
        for name in runs if turn % 2 == 0 else reversed(runs):
            runs[name].step()  # brings its code and its memory back into the caches
            runs[name].step()
            if turn < WARM_ROUNDS:
                continue
            for body, taken in runs[name].measured().items():
                times.setdefault(body, {name: [] for name in runs})[name].append(taken)
    return [first.describe(*body, times=found) for body, found in sorted(times.items())]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    """A workload with one kind of code."""

    graphs: Sequence[CompiledGraph]
    step: Callable[[], None]

    def measured(self) -> dict[tuple[int, int], int]:
        """Return how long each body took in the last step, by graph and body."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for number, graph in enumerate(self.graphs):
            segments = graph.compilation.partition.graph.segments
            for span in graph.trace().spans:
                found[number, segments[span.segment].body] += span.end_ns - span.start_ns
        return found

    def describe(self, graph: int, body: int, *, times: Mapping[str, Sequence[float]]) -> BodyTimes:
        """Return the times of a body with its name."""
        compilation = self.graphs[graph].compilation
        segments = [each for each in compilation.partition.graph.segments if each.body == body]
        return BodyTimes(
            graph=compilation.capture.name, segment=segments[0].name, num_segments=len(segments), times=times
        )


def _compile(workload: Workload, code: Code) -> _Compiled:
    options = {"plan.planner": "serial", "plan.autotune": False, "plan.remember": False, "debug.strict": True}
    # Dynamo takes backends with equal options for one, whatever Inductor is set to; a partial equals itself alone.
    own = partial(backend.apollo, options={**options, **code.options})

    def step() -> None:
        workload.model.zero_grad(set_to_none=True)
        workload.loss(compiled(**workload.inputs)).backward()

    begin = time.perf_counter()
    compiled = torch.compile(workload.model, backend=own)
    known = registry.compiled_models()
    with torch._dynamo.config.patch(recompile_limit=MOST_KINDS), inductor_config.patch(dict(code.settings)):
        step()
    print(f"   {workload.name}: {code.name} code compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    models = [model for model in registry.compiled_models() if model not in known]
    for name, reason in (fallback for model in models for fallback in model.fallbacks):
        print(f"   {workload.name}: {name} is left out: {reason}", file=sys.stderr)
    return _Compiled(graphs=[graph for model in models for graph in model.graphs], step=step)


def _cuts(compiled: _Compiled) -> list[tuple[str, list[tuple[str, int]]]]:
    return [
        (
            graph.compilation.capture.role,
            [(each.name, each.body) for each in graph.compilation.partition.graph.segments],
        )
        for graph in compiled.graphs
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON; return the exit code."""
    args = _parse(arguments)
    content: dict[str, Any] = {"machine": machine_facts(), "workloads": []}
    codes = [code for code in CODES if code.name in (NATIVE, *args.codes)]
    rows = []
    for name in args.workloads:
        for batch in args.batch:
            workload = build(name, args.size, batch=batch)
            bodies = measure_codes(workload, codes, rounds=args.rounds)
            evened = even_out(bodies)
            gains = find_gains(evened)
            print(f"\n== {name}, {args.size}, batch {batch or 'as specified'}\n{_table(evened)}", flush=True)
            rows.append([name, batch, *_row(evened, gains)])
            found = {"name": name, "size": args.size, "batch": batch, "gains": gains}
            content["workloads"].append({**found, "bodies": list(map(asdict, bodies))})
            if args.json is not None:
                args.json.write_text(json.dumps(content) + "\n", encoding="utf-8")
    headers = ["workload", "batch", *(f"{code.name} ms" for code in codes), "bodies", "gain", "halves"]
    print("\n" + tabulate(rows, headers=headers))
    return 0


def _table(bodies: Sequence[BodyTimes]) -> str:
    rows = [
        [
            body.graph,
            body.segment,
            body.num_segments,
            *(f"{body.median(code) / NS_PER_MS:.2f}" for code in _codes(bodies)),
        ]
        for body in sorted(bodies, key=lambda body: -body.median(NATIVE))
    ]
    return tabulate(rows, headers=["graph", "first segment", "segments", *(f"{code} ms" for code in _codes(bodies))])


def _row(bodies: Sequence[BodyTimes], gains: Sequence[float]) -> list[object]:
    sums = [sum(body.median(code) for body in bodies) / NS_PER_MS for code in _codes(bodies)]
    halves = " ".join(f"{gain:+.1%}" for gain in gains)
    return [*(f"{total:.2f}" for total in sums), len(bodies), f"{statistics.mean(gains):+.1%}", halves]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    names = [code.name for code in CODES if code.name != NATIVE]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.body_codes", description="Time bodies in other code.")
    parser.add_argument("--workloads", type=names_of(SPECS), default=list(SPECS), help=", ".join(SPECS))
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=batch_sizes, default=[None], help="numbers; default: the spec's")
    parser.add_argument("--codes", type=names_of(names), default=names, help=f"besides {NATIVE}: {', '.join(names)}")
    parser.add_argument("--rounds", type=_rounds, default=20, help="timed steps with every code")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(
            f"expected at least {LEAST_ROUNDS} rounds, half of them to choose by, got {rounds}"
        )
    return rounds


if __name__ == "__main__":
    sys.exit(main())
