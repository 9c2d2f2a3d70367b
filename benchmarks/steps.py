"""Measure whole training steps: micro-batches, their gradients, and the optimizer.

    python -m benchmarks.steps --workloads clip,llava --optimizers adamw --microbatches 1,4 --json out.json
    python -m benchmarks.steps --workloads all --microbatches 1,2,4 --warm-cache --json out.json

A step is `zero_grad`, forward and backward of every micro-batch, and the optimizer's step, on a batch of `--batch`
samples. Variants are the loop in eager, compiled by Inductor and by apollo; the whole step traced as one graph for
Inductor, with the optimizer after it or inside; the full batch with Inductor; and `compile_step`, with its comparison
and without. `apollo_compile.tools.bench` times steps, and `benchmarks.harness.whole_steps` takes them.

The last table compares `compile_step` with each of its rivals, with 95 % intervals over rounds. Exit code 1: after the
same number of steps, a variant's loss or weights are not those of the loop in eager. A full batch is another training
than its micro-batches where samples of a batch are compared with each other, and not judged there.

A step of a learner (`workloads/learners.py`) is one update: a step for each of its phases, with optimizers of its own,
then its targets. It is measured with one micro-batch, and with loops and `compile_step`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from apollo_compile.tools.bench.numbers import Measurement, VariantResult, summarize
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from benchmarks.harness.whole_steps import COMPARED, COMPILED, FULL_BATCH, LOOP, OF_LEARNERS, TRACED, TRACED_WHOLE
from benchmarks.run import batch_sizes, measure_tasks, names_of
from benchmarks.workloads.learners import LEARNERS
from benchmarks.workloads.specs import SPECS

WORKLOADS = (*(name for name in SPECS if name != "clap"), *LEARNERS)

CONTRASTED = ("clip", "flava", "two_tower")
"""Workloads whose loss compares the samples of a batch: of one sample it is constant, and of a full batch another."""

BATCHES: Mapping[str, int] = {**dict.fromkeys(CONTRASTED, 8), "sac": 256, "redq": 256, "dreamer": 8}
"""Samples of a step, by workload; 4 of any other."""

STEP, LOOP_OF_APOLLO = "apollo-step", "apollo"

VARIANTS: tuple[MeasuredVariant, ...] = (
    MeasuredVariant(name="eager", backend=None, stepper=LOOP),
    MeasuredVariant(name="inductor", backend="inductor", stepper=LOOP),
    MeasuredVariant(name="inductor-traced", backend="inductor", stepper=TRACED),
    MeasuredVariant(name="inductor-traced-whole", backend="inductor", stepper=TRACED_WHOLE),
    MeasuredVariant(name="inductor-full-batch", backend="inductor", stepper=FULL_BATCH),
    MeasuredVariant(name=LOOP_OF_APOLLO, backend="apollo", stepper=LOOP),
    MeasuredVariant(name="apollo-step-program", backend="apollo", options={"plan.autotune": False}, stepper=COMPILED),
    MeasuredVariant(
        name=STEP, backend="apollo", options={"plan.compile_share": 1e3}, stepper=COMPILED
    ),  # as after a long run
)

KEPT_MEMORY = (
    MeasuredVariant(name="inductor-traced-kept-memory", backend="inductor", stepper=TRACED, keeps_memory=True),
)
"""The strongest rival with apollo's allocator settings, to see how much of a gain is due to kept memory."""

FUNCTIONS = (MeasuredVariant(name="apollo-traced-whole", backend="apollo", stepper=TRACED_WHOLE),)
"""A function of the user's that is a whole step, compiled by apollo."""

OWN_CASTS = (
    MeasuredVariant(
        name="apollo-step-program-own-casts",
        backend="apollo",
        options={"plan.autotune": False, "partition.casts": "together"},
        stepper=COMPILED,
    ),
)
"""A program in which every micro-batch casts weights for itself, to see what casting them once gains."""

KNOWN = {variant.name: variant for variant in (*VARIANTS, *KEPT_MEMORY, *FUNCTIONS, *OWN_CASTS)}

RIVALS = ("inductor", "inductor-traced", "inductor-traced-whole", "inductor-full-batch", LOOP_OF_APOLLO)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write JSON; return the exit code."""
    args = _parse(arguments)
    cases = []
    for name, optimizer, count in itertools.product(args.workloads, args.optimizers, args.microbatches):
        batch = args.batch or BATCHES.get(name, 4)
        title = f"{name}, {args.size}, {optimizer}, batch {batch} in {count} micro-batches"
        extra = f", dropout {args.dropout}" * (args.dropout > 0) + ", torch's choice of kernels" * args.default_kernels
        extra += ", bfloat16 autocast" * args.autocast
        title += extra
        chosen = [each for each in args.variants if count > 1 or each.stepper != FULL_BATCH]
        if name in LEARNERS:
            if (optimizer, count) != (args.optimizers[0], args.microbatches[0]):
                continue
            optimizer, count, title = "its own", 1, f"{name}, {args.size}, batch {batch}{extra}"
            steppers = [(each, OF_LEARNERS.get(each.stepper)) for each in args.variants]
            chosen = [replace(each, stepper=stepper) for each, stepper in steppers if stepper is not None]
        others = {"dropout": args.dropout, "fused": None if args.default_kernels else True, "autocast": args.autocast}
        task = make_task(name, args.size, batch, optimizer, count, **others)
        cases.append((title, task, chosen))
    measurements, wrong = measure_tasks(cases, args, is_judged)
    if len(measurements) > 1:
        print(f"\n{format_overview(measurements)}", flush=True)
    for line in wrong:
        print(f"WRONG NUMBERS: {line}")
    return 1 if wrong else 0


def make_task(name: str, size: str, batch: int, optimizer: str, microbatches: int, **others: Any) -> MeasuredTask:
    """Return the task of a workload; `others` are further arguments of `harness.whole_steps.build_task`."""
    arguments: dict[str, Any] = {
        "name": name,
        "size": size,
        "batch": batch,
        "optimizer": optimizer,
        "microbatches": microbatches,
    }
    arguments |= others
    return MeasuredTask(builder="benchmarks.harness.whole_steps:build_task", arguments=arguments, compared=COMPARED)


def is_judged(task: MeasuredTask, result: VariantResult) -> bool:
    """Return whether the variant trains as the loop does: not where eager draws or rounds other numbers."""
    is_same_loss = result.variant != "inductor-full-batch" or task.arguments["name"] not in CONTRASTED
    return is_same_loss and not task.arguments.get("dropout") and not task.arguments.get("autocast")


def format_overview(measurements: Sequence[Measurement]) -> str:
    """Return how many times as fast as each rival a compiled step is, with intervals, and geometric means."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, list[float]] = {}
    for measurement in measurements:
        found, task = measurement.by_variant(), measurement.task.arguments
        if STEP not in found:
            continue
        own = found[STEP].rounds_ns
        cells = []
        for rival in RIVALS:
            if rival not in found:
                cells.append("-")
                continue
            over = summarize(own, found[rival].rounds_ns)
            ratios.setdefault(rival, []).append(over.speedup)
            cells.append(f"{over.speedup:.2f}x ({over.speedup_low:.2f} .. {over.speedup_high:.2f})")
        label = f"{task['name']}, {task['optimizer']}, batch {task['batch']} in {task['microbatches']}"
        rows.append((label, *cells, ", ".join(found[STEP].ran)))
    means = (f"{statistics.geometric_mean(ratios[rival]):.2f}x" if rival in ratios else "-" for rival in RIVALS)
    rows.append((f"geometric mean of {len(rows)}", *means, ""))
    headers = (f"{STEP} over", *RIVALS, "chosen")
    table: str = tabulate(rows, headers=headers, disable_numparse=True)
    return table


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description="Measure whole training steps.")
    parser.add_argument(
        "--workloads", type=_workloads, default=["clip", "llava"], help=f"all, or some of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, help=f"samples of a step; default: {dict(BATCHES)}, else 4")
    parser.add_argument("--optimizers", type=names_of(("sgd", "adamw")), default=["adamw"], help="sgd, adamw")
    parser.add_argument("--default-kernels", action="store_true", help="optimizers without fused=True")
    parser.add_argument("--microbatches", type=batch_sizes, default=[1, 4], help="numbers of micro-batches, e.g. 1,2,4")
    parser.add_argument("--dropout", type=float, default=0.0, help="every dropout of a workload; default: 0")
    parser.add_argument("--autocast", action="store_true", help="forwards and losses under bfloat16 autocast")
    parser.add_argument("--variants", type=_variants, default=list(VARIANTS), help=", ".join(KNOWN))
    parser.add_argument("--steps", type=int, default=30, help="timed steps of every variant")
    parser.add_argument("--steps-per-turn", type=int, default=3, help="timed steps before the next variant's turn")
    parser.add_argument(
        "--warm-cache", action="store_true", help="use the user's Inductor cache; first steps are not cold"
    )
    parser.add_argument("--json", type=Path, help="write everything there, machine and versions included")
    args = parser.parse_args(arguments)
    if args.autocast and not set(args.workloads).isdisjoint(LEARNERS):
        parser.error(f"--autocast is for other workloads than {', '.join(LEARNERS)}")
    return args


def _workloads(text: str) -> list[str]:
    return list(WORKLOADS) if text == "all" else names_of(WORKLOADS)(text)


def _variants(text: str) -> list[MeasuredVariant]:
    return [KNOWN[name] for name in names_of(KNOWN)(text)]


if __name__ == "__main__":
    sys.exit(main())
