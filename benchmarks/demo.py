"""The main job: `backend="apollo"` trains a real CLIP, and shows its plan and its speed.

    python -m benchmarks.demo

(a) trains a Hugging Face `CLIPModel` with random weights on random data; (b) prints the partition report: modules,
segments, lanes, quotas, predicted and measured times; (c) loss and gradients against eager; (d) the table eager,
Inductor and its max-autotune mode, apollo on one lane, apollo, measured interleaved in processes of their own; (e) in
the same way, whole steps with AdamW: the loop over micro-batches in eager and on apollo, and `compile_step`. Exit code
1: wrong numbers. With `--ranks 2`, two processes train as a deployment plan says instead (`examples/deploy.py`).
"""

from __future__ import annotations

import argparse
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

import apollo_compile
from apollo_compile.tools.bench.numbers import Measurement
from apollo_compile.tools.bench.render import format_measurement
from apollo_compile.tools.bench.task import VARIANTS, MeasuredTask
from apollo_compile.tools.bench.turns import measure
from apollo_compile.units import format_ns, seconds_to_ns
from benchmarks.run import variants
from benchmarks.steps import LOOP_OF_APOLLO, STEP, make_task
from benchmarks.steps import VARIANTS as STEP_VARIANTS
from benchmarks.workloads import Workload, build

MICRO_BATCHES = 2

LINES = 10
"""Lines of progress where the output is no terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Train, report, compare, measure; return the exit code."""
    args = _parse(arguments)
    if args.ranks:
        command = f"-m torch.distributed.run --standalone --nproc-per-node {args.ranks} -m examples.deploy --compare"
        return subprocess.call([sys.executable, *command.split()])
    logging.basicConfig(format="   %(message)s", stream=sys.stderr)
    logging.getLogger("apollo_compile").setLevel(logging.INFO)
    begin = time.perf_counter()
    workload = build("clip", args.size, batch=args.batch)

    _headline(f"Training CLIPModel ({_count(workload)}), batch {args.batch}, on backend='apollo'")
    compiled = torch.compile(workload.model, backend="apollo")
    losses = train(workload, compiled, args.steps)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")

    _headline("What apollo made of it")
    print(apollo_compile.report(workload.model))

    _headline("Interleaved measurement: one process per variant, one at a time")
    measurement = measure(
        MeasuredTask(
            builder="benchmarks.workloads:build", arguments={"name": "clip", "size": args.size, "batch": args.batch}
        ),
        args.variants,
        rounds=args.rounds,
        cold=not args.warm_cache,
        progress=lambda line: print(f"   {line}", file=sys.stderr, flush=True),
    )

    _headline("Loss and gradients of the first step against eager")
    is_right = _print_differences(measurement)
    _headline("Step times")
    print(format_measurement(measurement))

    _headline(f"Whole steps: AdamW, batch {args.batch} in {MICRO_BATCHES} micro-batches, the loop and one program")
    steps = measure(
        make_task("clip", args.size, args.batch, "adamw", MICRO_BATCHES),
        [each for each in STEP_VARIANTS if each.name in ("eager", LOOP_OF_APOLLO, STEP)],
        rounds=args.rounds,
        cold=False,  # much of it has been compiled by now
        progress=lambda line: print(f"   {line}", file=sys.stderr, flush=True),
    )
    print(format_measurement(steps))
    is_right = _print_differences(steps) and is_right
    is_falling = math.isfinite(losses[-1]) and losses[-1] < losses[0]
    if not is_falling:
        print(f"WRONG: the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"\ndone in {format_ns(seconds_to_ns(time.perf_counter() - begin))}")
    return 0 if is_right and is_falling else 1


def train(workload: Workload, compiled: Callable[..., Any], steps: int) -> list[float]:
    """Fit the workload's one batch with AdamW; return the loss of every step."""
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    losses: list[float] = []
    for _ in _progress(steps, losses):
        loss = workload.loss(compiled(**workload.inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _progress(steps: int, losses: list[float]) -> Iterator[int]:
    """Count steps with a bar on a terminal, and with plain lines elsewhere; the first step compiles."""
    if sys.stderr.isatty():
        with tqdm(range(steps), desc="compiling, then training", unit="step") as bar:
            for step in bar:
                yield step
                bar.set_postfix(loss=f"{losses[-1]:.4f}")
        return
    print("compiling, then training", flush=True)
    for step in range(steps):
        yield step
        if step == 0 or (step + 1) % max(steps // LINES, 1) == 0:
            print(f"step {step + 1:3d}/{steps}  loss {losses[-1]:.4f}", flush=True)


def _print_differences(measurement: Measurement) -> bool:
    is_right, task = True, measurement.task
    for result in measurement.results:
        difference = result.difference
        is_within = difference.is_within(task.tolerance)
        is_right = is_right and is_within
        verdict = "ok" if is_within else f"WRONG, more than {task.tolerance:.0e}"
        print(
            f"{result.variant:21s} loss {result.loss:.6f}, off by {difference.loss_abs:.1e} ({difference.loss_rel:.1e} "
            f"relative); {task.compared} off by at most {difference.gradient_abs:.1e} ({difference.gradient_rel:.1e} "
            f"relative, {difference.worst or '-'}): {verdict}"
        )
        if difference.unmatched:
            print(f"{'':21s} {task.compared} that only one side has: {', '.join(difference.unmatched)}")
    return is_right


def _count(workload: Workload) -> str:
    return f"{sum(parameter.numel() for parameter in workload.model.parameters()) / 1e6:.1f} M parameters"


def _headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description="Train CLIP on apollo; show its worth."
    )
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=170, help="training steps; the comparison needs about 150 to end")
    parser.add_argument(
        "--variants",
        type=variants,
        default=list(VARIANTS),
        help="what to measure, e.g. eager,apollo; all five by default",
    )
    parser.add_argument("--ranks", type=int, help="instead, train CLIP on so many processes by a deployment plan")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the measurement, three timed steps each")
    parser.add_argument(
        "--warm-cache", action="store_true", help="use the user's Inductor cache; first steps are not cold"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
