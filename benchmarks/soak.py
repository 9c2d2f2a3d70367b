"""Change models, modes and shapes in one process for as long as asked, and watch that nothing grows or goes wrong.

    python -m benchmarks.soak --minutes 30 --json out.json

An episode compiles one model from nothing, compares it with eager in each of `STEPS` steps, and forgets it.
A round has every episode once: models, ways to call them and kinds of shapes. The first `WARM_ROUNDS` rounds fill
caches, of torch's compilers too; after each later one, memory, threads and open files are compared with those of the
last warm one. Exit code 1: something grew, raised, or differs from eager, or there was time for no comparison.

Memory may grow by `steady.ALLOWED_GROWTH` in all, or by `ALLOWED_PER_EPISODE` for each: torch keeps a little of
every compile, and this is no measure of steps, for which there is `benchmarks.steady`. Inductor keeps the Python
module of every graph that it compiles (`PyCodeCache.modules`, 10 to 15 KiB) and the source of the graph that it made
for the key of its cache (in `linecache`, 3 KiB); to it, every body is a graph. Of the rest, nothing is ours.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from apollo_compile.bench import machine_facts
from apollo_compile.units import NS_PER_S, format_bytes
from benchmarks.steady import Slice, find_growth, look

STEPS = 24
WARM_ROUNDS = 2
ALLOWED_PER_EPISODE = 2**20
"""Bytes, about four times what was measured: 0.26 MiB for two towers in four bodies, of which Inductor alone leaves
0.15 MiB in two graphs."""
WIDTH = 32
BATCHES = {"one shape": (16,), "changing shapes": (16, 3, 9, 27), "a plan each": (16, 8)}
TOLERANCE = 1e-3


class Towers(nn.Module):
    """Two towers that meet in the end; of each kind of layer, something that graphs find hard."""

    def __init__(self, normalization: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), normalization(2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities of all pairs."""
        left, right = (self.dropout(tower(x)) for tower in self.towers)
        return left @ right.T / WIDTH


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: Towers(nn.LayerNorm, 0.0),
    "batch norm": lambda: Towers(nn.BatchNorm1d, 0.0),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
}
MODES = ("train", "train in bfloat16", "no_grad", "inference_mode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One model, compiled once."""

    model: str
    mode: str
    shapes: str

    def run(self) -> str | None:
        """Run it; return what is wrong."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MODELS[self.model]()
        twin = copy.deepcopy(model)
        dynamic = False if self.shapes == "a plan each" else None
        compiled = torch.compile(model, backend="apollo", dynamic=dynamic)
        for step in range(STEPS):
            batches = BATCHES[self.shapes]
            x = torch.randn(batches[step % len(batches)], WIDTH)
            results = [self._step(run, owner, x) for run, owner in ((compiled, model), (twin, twin))]
            problem = self._compare(*results)
            if problem is not None:
                return f"{self}, step {step}: {problem}"
        return None

    def _step(self, run: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with contextlib.ExitStack() as stack:
            if self.mode == "train in bfloat16":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            elif self.mode != "train":
                stack.enter_context(getattr(torch, self.mode)())
            output = run(x)
        if not self.mode.startswith("train"):
            return [output]
        output.float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return [output.detach(), *gradients]

    def _compare(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
        tolerance = 50 * TOLERANCE if self.mode == "train in bfloat16" else TOLERANCE
        try:
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            return str(error).splitlines()[0]
        return None


EPISODES = tuple(
    Episode(model=model, mode=mode, shapes=shapes) for shapes in BATCHES for model in MODELS for mode in MODES
)


def soak(
    episodes: Sequence[Episode],
    seconds: float,
    tell: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Slice], list[str]]:
    """Run rounds of episodes; return what the process had after each whole round, and what went wrong."""
    end = clock() + seconds
    rounds: list[Slice] = []
    problems: list[str] = []
    while clock() < end:
        begin = time.perf_counter_ns()
        for episode in episodes:
            try:
                problem = episode.run()
            except Exception as error:  # the others go on: one soak is to find all
                problem = f"{episode}: {type(error).__name__}: {str(error).splitlines()[:1]}"
            if problem is not None:
                problems.append(problem)
                tell(f"WRONG: {problem}")
            if clock() >= end:
                return rounds, problems
        torch._dynamo.reset()
        gc.collect()
        rounds.append(look(len(rounds) + 1, time.perf_counter_ns() - begin))
        tell(f"round {len(rounds)}: {rounds[-1].step_ns / NS_PER_S:.0f} s, {format_bytes(rounds[-1].resident_bytes)}")
    return rounds, problems


def judge(rounds: Sequence[Slice], num_episodes: int) -> list[str]:
    """Return what the last of the rounds of so many episodes has more of than the last warm one."""
    if len(rounds) <= WARM_ROUNDS:
        return [f"only {len(rounds)} whole rounds, {WARM_ROUNDS + 1} are needed to compare: give it more minutes"]
    warm, last = rounds[WARM_ROUNDS - 1], rounds[-1]
    allowed = ALLOWED_PER_EPISODE * num_episodes * (len(rounds) - WARM_ROUNDS)
    if warm.resident_bytes < last.resident_bytes <= warm.resident_bytes + allowed:
        last = replace(last, resident_bytes=warm.resident_bytes)
    return [f"GREW: {line}" for line in find_growth([warm], [last])]


def main(arguments: list[str] | None = None) -> int:
    """Run, print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Change everything, for long.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=int, default=1, help="take every so many-th episode, for shorter rounds")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args(arguments)
    chosen = EPISODES[:: args.every]
    rounds, problems = soak(chosen, 60 * args.minutes, functools.partial(print, file=sys.stderr, flush=True))
    rows: list[tuple[Any, ...]] = [
        (s.last_step, f"{s.step_ns / NS_PER_S:.0f} s", format_bytes(s.resident_bytes), s.num_threads, s.num_files)
        for s in rounds
    ]
    print(tabulate(rows, headers=("round", "took", "resident", "threads", "files")))
    problems += judge(rounds, len(chosen))
    if args.json is not None:
        content = {"machine": machine_facts(), "rounds": list(map(asdict, rounds)), "problems": problems}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n".join(problems) or f"nothing grew or went wrong in {len(rounds)} rounds of {len(chosen)} episodes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
