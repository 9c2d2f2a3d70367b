"""What a call costs beside Inductor's where a graph is so small that there is nothing to run beside anything.

    python -m benchmarks.call_overhead --json out.json

Every model is compiled twice in one process, by Inductor and by apollo as users call it, and trained until apollo's
decisions are final. Then both take turns of `CALLS` calls each, in alternating order, so that drift of the machine
falls on both; a round's difference is that of the two medians in it. `forward` is a call without gradients, `step` is a
call and its backward pass. Printed are medians over rounds, the interval of the median difference (95 %, by bootstrap
over rounds), and by graph how many segments it has and what of it runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from apollo_compile.ir import Variant
from apollo_compile.ir.text import format_count
from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.tools.bench.turns import turn_orders
from apollo_compile.units import format_ns

CALLS = 100
"""Of one side in a round; their median is not that of a timer's tick or of an interrupt."""

MOST_CALLS_TO_SETTLE = 4_000
RESAMPLES = 2_000


class Scale(nn.Module):
    """A chain of pointwise operators: one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, value: Tensor) -> Tensor:
        """Return a tensor of the shape of `value`."""
        return nn.functional.gelu(value * self.weight + 1)


def make_models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return models with their inputs, from a single kernel to a dozen."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    return {
        "scale": (Scale(), torch.randn(16, 64)),
        "linear": (nn.Linear(64, 64), torch.randn(16, 64)),
        "mlp": (mlp, torch.randn(64, 128)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One model, called in one way."""

    model: str
    mode: str
    runs: str
    """What apollo runs, by graph."""
    inductor_ns: Sequence[float]
    """Median call of every round."""
    apollo_ns: Sequence[float]

    @property
    def differences_ns(self) -> list[float]:
        """How much longer apollo's call takes, by round."""
        return [ours - theirs for ours, theirs in zip(self.apollo_ns, self.inductor_ns, strict=True)]

    def interval_ns(self) -> tuple[float, float]:
        """Return the ends of the 95 % interval of the median difference."""
        found = np.asarray(self.differences_ns)
        picks = np.random.default_rng(0).integers(len(found), size=(RESAMPLES, len(found)))
        low, high = np.percentile(np.median(found[picks], axis=1), (2.5, 97.5))
        return float(low), float(high)


def compare(name: str, model: nn.Module, value: Tensor, *, rounds: int) -> list[Comparison]:
    """Time forward calls and training steps of both."""
    torch.compiler.reset()  # a function that is called with other shapes would be compiled for all of them
    ours, theirs = model, copy.deepcopy(model)
    compiled = {
        "inductor": torch.compile(theirs, backend="inductor"),
        "apollo": torch.compile(ours, backend="apollo"),
    }

    def forward(side: str) -> None:
        with torch.no_grad():
            compiled[side](value)

    def step(side: str) -> None:
        compiled[side](value).sum().backward()

    for call in (forward, step):
        call("inductor")
        settle(partial(call, "apollo"), ours)
    found = []
    for mode, call in (("forward", forward), ("step", step)):
        times: dict[str, list[float]] = {side: [] for side in compiled}
        for order in tqdm(
            turn_orders(list(compiled), rounds), total=rounds, desc=f"   {name}, {mode}", file=sys.stderr, mininterval=5
        ):
            settle(partial(call, "apollo"), ours)  # drift of the machine may have opened the comparison again
            for side in order:
                call(side)  # brings its code back into the caches
                times[side].append(statistics.median(_time(call, side) for _ in range(CALLS)))
        found.append(
            Comparison(
                model=name,
                mode=mode,
                runs=_what_runs(ours),
                inductor_ns=times["inductor"],
                apollo_ns=times["apollo"],
            )
        )
    return found


def settle(call: Callable[[], None], model: nn.Module) -> None:
    """Call until nothing about `model` is being decided any more, at least once and `MOST_CALLS_TO_SETTLE` at most."""
    call()
    for _ in range(MOST_CALLS_TO_SETTLE):
        if registry.is_settled(model):
            return
        call()


def _time(call: Callable[[str], None], side: str) -> int:
    begin = time.perf_counter_ns()
    call(side)
    return time.perf_counter_ns() - begin


def _what_runs(model: nn.Module) -> str:
    found = []
    for compiled in registry.find_models(model):
        found += [f"{name}: {Variant.INDUCTOR}" for name, _ in compiled.fallbacks]
        for graph in compiled.graphs:
            segments = format_count(len(graph.compilation.partition.graph.segments), "segment")
            found.append(f"{graph.compilation.capture.name} ({segments}): {graph.variant}")
    return ", ".join(found)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON; return the exit code."""
    args = _parse(arguments)
    comparisons: list[Comparison] = []
    for name, (model, value) in make_models().items():
        comparisons += compare(name, model, value, rounds=args.rounds)
    headers = ("model", "mode", "inductor", "apollo", "more", "95 %", "what runs")
    print(tabulate(map(_row, comparisons), headers=headers))
    if args.json is not None:
        content = {"machine": machine_facts(), "comparisons": list(map(asdict, comparisons))}
        args.json.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return 0


def _row(found: Comparison) -> tuple[str, ...]:
    low, high = map(format_ns, found.interval_ns())
    medians = [statistics.median(each) for each in (found.inductor_ns, found.apollo_ns, found.differences_ns)]
    return found.model, found.mode, *map(format_ns, medians), f"{low} .. {high}", found.runs


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.call_overhead", description="Time calls of one segment."
    )
    parser.add_argument("--rounds", type=int, default=40, help=f"turns of {CALLS} calls of either side")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
