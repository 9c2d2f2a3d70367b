"""Change models, modes and shapes in one process for as long as asked, and watch that nothing grows or goes wrong.

    python -m benchmarks.soak --minutes 30 --json out.json
    python -m benchmarks.soak --minutes 30 --inductor               the same without apollo: its growth is not ours

An episode compiles one model from nothing, compares it with eager in each of `STEPS` steps, and forgets it. Every
other episode has the default options, with which such small models are measured and mostly Inductor's in the end; in
the others plans run on lanes wherever there are any (`sweep.make_options`), and every defect is raised. A round has
every episode once: models, ways to call them and kinds of shapes. The first `WARM_ROUNDS` rounds fill caches, of the
compilers of torch too; after each later one, memory, threads and open files are compared with those of the last warm
one. Where caches are cold, the first rounds alone can take longer than asked: it ends after the first round that can be
compared. Exit code 1: something grew, raised, or differs from eager, or no graph of a round ran on lanes.

Memory may grow by `ALLOWED_GROWTH` of `harness/growth.py` in all, or by `ALLOWED_PER_EPISODE` for each, since torch
keeps a little of every compile. Dynamo keeps the call stacks of guards on things that live for ever, such as classes;
Inductor keeps the Python module of every graph that it compiles (`PyCodeCache.modules`, 10 to 15 KiB) and the source of
the graph that it made for the key of its cache (in `linecache`, 3 KiB); and torch keeps facts of dynamic sizes. Over
all models in training (`--every 4`) that makes 1.65 MiB an episode with Inductor alone. With apollo it was 3.1 MiB,
until these facts and the modules of bodies went with the model; since then it is 1.6 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._pytree import tree_leaves

from apollo_compile.device.cpu.execute import trim_memory
from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_S, format_bytes
from benchmarks.harness.growth import Slice, find_growth, look
from benchmarks.sweep import make_options
from benchmarks.workloads import build_spec
from benchmarks.workloads.specs import SPECS

STEPS = 24
WARM_ROUNDS = 2
ALLOWED_PER_EPISODE = 2**21
"""Bytes, a fifth more than Inductor alone leaves of an episode in training."""
WIDTH = 32
BATCHES = {"one shape": (8,), "changing shapes": (8, 3, 5, 11), "a plan each": (8, 4)}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model, and how to make its inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Mapping[str, Any]] = lambda batch: {"x": torch.randn(batch, WIDTH)}
    """Returns inputs for a batch size."""


def _from_hugging_face(name: str) -> Subject:
    """Return a workload, the smallest there is of it."""
    return Subject(
        build=lambda: build_spec(name, SPECS[name]).model,
        inputs=functools.cache(lambda batch: build_spec(name, SPECS[name], batch=batch, seed=batch).inputs),
    )


SUBJECTS = {
    "layer norm": Subject(build=lambda: Towers(nn.LayerNorm, 0.0)),
    "batch norm": Subject(build=lambda: Towers(nn.BatchNorm1d, 0.0)),
    "attention": Subject(
        build=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
        inputs=lambda batch: {"src": torch.randn(batch, WIDTH)},
    ),
    "clip": _from_hugging_face("clip"),
    "whisper": _from_hugging_face("whisper"),
}
MODES = ("train", "train in bfloat16", "no_grad", "inference_mode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an episode."""

    problem: str | None = None
    num_on_lanes: int = 0
    """Graphs that ran on more than one lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """All episodes, once each."""

    after: Slice
    """The process then; its step is the round."""
    num_on_lanes: int
    """Graphs that ran on more than one lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One model, compiled once."""

    model: str
    mode: str
    shapes: str
    on_lanes: bool
    """Whether its graphs run on lanes wherever their plan has some; else options are the default."""

    def run(self, lanes: Mapping[str, Any] | None) -> Outcome:
        """Run it; `lanes` are the options with which graphs run on lanes. None is Inductor alone."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        subject = SUBJECTS[self.model]
        model = subject.build()
        twin = copy.deepcopy(model)
        dynamic = False if self.shapes == "a plan each" else None
        options = dict(lanes) if lanes is not None and self.on_lanes else None
        name = "inductor" if lanes is None else "apollo"
        compiled = torch.compile(model, backend=name, dynamic=dynamic, options=options)
        for step in range(STEPS):
            batches = BATCHES[self.shapes]
            inputs = subject.inputs(batches[step % len(batches)])
            results = [self._step(run, owner, inputs) for run, owner in ((compiled, model), (twin, twin))]
            problem = self._compare(*results)
            if problem is not None:
                return Outcome(problem=f"{self}, step {step}: {problem}")
        graphs = [graph for found in registry.find_models(model) for graph in found.graphs if graph.has_run]
        lanes_used = [{span.lane for span in graph.trace().spans} for graph in graphs]
        return Outcome(num_on_lanes=sum(len(used) > 1 for used in lanes_used))

    def _step(self, run: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        with contextlib.ExitStack() as stack:
            if self.mode == "train in bfloat16":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            elif self.mode != "train":
                stack.enter_context(getattr(torch, self.mode)())
            outputs = [leaf for leaf in tree_leaves(run(**inputs)) if isinstance(leaf, torch.Tensor)]
        if not self.mode.startswith("train"):
            return outputs
        sum(output.float().square().mean() for output in outputs if output.requires_grad).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return [*(output.detach() for output in outputs), *gradients]

    def _compare(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
        tolerance = 50 * TOLERANCE if self.mode == "train in bfloat16" else TOLERANCE
        if len(found) != len(wanted):
            return f"{len(found)} tensors instead of {len(wanted)}"
        for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            largest = float(theirs.abs().max())
            try:
                torch.testing.assert_close(mine, theirs, rtol=0.0, atol=tolerance * max(1.0, largest))
            except AssertionError as error:
                return f"tensor {index} of {len(found)}: {' '.join(str(error).split())}"
        return None


EPISODES = tuple(
    Episode(model=model, mode=mode, shapes=shapes, on_lanes=(place + turn) % 2 == 0)
    for turn, shapes in enumerate(BATCHES)
    for model in SUBJECTS
    for place, mode in enumerate(MODES)
)


def soak(
    episodes: Sequence[Episode],
    seconds: float,
    lanes: Mapping[str, Any] | None,
    tell: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Round], list[str]]:
    """Run rounds of episodes; return the whole rounds, one after the warm ones at least, and all problems.

    `lanes` is as in `Episode.run`.
    """
    end = clock() + seconds
    rounds: list[Round] = []
    problems: list[str] = []

    def is_over() -> bool:
        return clock() >= end and len(rounds) > WARM_ROUNDS

    while not is_over():
        begin = time.perf_counter_ns()
        num_on_lanes = 0
        for episode in episodes:
            try:
                outcome = episode.run(lanes)
            except Exception as error:  # the others go on: one soak is to find all
                outcome = Outcome(problem=f"{episode}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            num_on_lanes += outcome.num_on_lanes
            if outcome.problem is not None:
                problems.append(outcome.problem)
                tell(f"WRONG: {outcome.problem}")
            if is_over():
                return rounds, problems
        torch._dynamo.reset()
        gc.collect()
        trim_memory()  # else free memory counts as much as the last compile happened to leave
        after = look(len(rounds) + 1, time.perf_counter_ns() - begin)
        rounds.append(Round(after=after, num_on_lanes=num_on_lanes))
        tell(
            f"round {len(rounds)}: {after.step_ns / NS_PER_S:.0f} s, {format_bytes(after.resident_bytes)}, "
            f"{num_on_lanes} graphs on lanes"
        )
    return rounds, problems


def judge(rounds: Sequence[Round], num_episodes: int, *, on_lanes: bool = True) -> list[str]:
    """Return the growth of the last of the rounds of so many episodes over the last warm one.

    A round without lanes is a problem too if there should be some.
    """
    idle = [each.after.last_step for each in rounds if on_lanes and not each.num_on_lanes]
    warm, last = rounds[WARM_ROUNDS - 1].after, rounds[-1].after
    allowed = ALLOWED_PER_EPISODE * num_episodes * (len(rounds) - WARM_ROUNDS)
    if warm.resident_bytes < last.resident_bytes <= warm.resident_bytes + allowed:
        last = replace(last, resident_bytes=warm.resident_bytes)
    growth = find_growth([warm], [last])
    return [f"no graph of round {number} ran on lanes" for number in idle] + [f"GREW: {line}" for line in growth]


def main(arguments: list[str] | None = None) -> int:
    """Run, print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Change everything, for long.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=int, default=1, help="take every so many-th episode, for shorter rounds")
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor alone")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args(arguments)
    chosen = EPISODES[:: args.every]
    tell = functools.partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lanes = None if args.inductor else make_options(Path(folder) / "profile.json")
        rounds, problems = soak(chosen, 60 * args.minutes, lanes, tell)
    rows: list[tuple[Any, ...]] = [
        (
            each.after.last_step,
            f"{each.after.step_ns / NS_PER_S:.0f} s",
            format_bytes(each.after.resident_bytes),
            each.after.num_threads,
            each.after.num_files,
            each.num_on_lanes,
        )
        for each in rounds
    ]
    print(tabulate(rows, headers=("round", "took", "resident", "threads", "files", "graphs on lanes")))
    problems += judge(rounds, len(chosen), on_lanes=lanes is not None)
    if args.json is not None:
        content = {"machine": machine_facts(), "rounds": list(map(asdict, rounds)), "problems": problems}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n".join(problems) or f"nothing grew or went wrong in {len(rounds)} rounds of {len(chosen)} episodes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
