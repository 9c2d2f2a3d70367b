"""Measure named workloads: eager, Inductor and its max-autotune mode, apollo on one lane, apollo.

    python -m benchmarks.run --workloads clip,two_tower --size small --batch 1,4 --modes train,inference --json out.json
    python -m benchmarks.run --workloads all --batch all --warm-cache --json out.json

`--dtype float32,bfloat16` also measures steps under autocast, which is how CPUs with AMX are used.

`--batch all` is a small, a medium and a large one for every workload. Last comes a table with a row per measurement,
and geometric means over workloads with parallel branches at their smaller batches.

Exit code 1: a variant's loss or gradients are not those of the reference. How steps are timed:
`apollo_compile.tools.bench`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.tools.bench.numbers import Measurement, VariantResult, to_json
from apollo_compile.tools.bench.render import format_measurement
from apollo_compile.tools.bench.task import (
    AGAIN,
    INDUCTOR_MODES,
    KEPT_MEMORY,
    LIBRARIES,
    PLANS,
    TOLERANCES,
    VARIANTS,
    MeasuredTask,
    MeasuredVariant,
)
from apollo_compile.tools.bench.turns import measure
from benchmarks.workloads.specs import SPECS

_AS_RIVAL = (MeasuredVariant(name="inductor-as-rival", backend="inductor", stepper="benchmarks.harness.rival:Rival"),)

_KNOWN = {variant.name: variant for variant in (*VARIANTS, *KEPT_MEMORY, *AGAIN, *_AS_RIVAL, *LIBRARIES, *PLANS)}

_BATCHES = {"two_tower": (1, 4, 8), "whisper": (1, 2, 4)}
_OTHER_BATCHES = (2, 4, 8)
"""Small, medium and large: a contrastive loss of one sample is constant, and Whisper's samples are long."""

_BRANCHED = ("two_tower", "clip", "flava", "clap")
"""Workloads whose forward has modules that can run side by side."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write JSON; return the exit code."""
    args = _parse(arguments)
    cases = []
    for name, mode, dtype in itertools.product(args.workloads, args.modes, args.dtypes):
        for batch in args.batch or _BATCHES.get(name, _OTHER_BATCHES):
            task = MeasuredTask(
                builder="benchmarks.workloads:build",
                arguments={"name": name, "size": args.size, "batch": batch},
                mode=mode,
                dtype=dtype,
            )
            title = f"{name}, {args.size}, batch {batch or 'of the spec'}, {mode}, {dtype}"
            cases.append((title, task, args.variants))
    measurements, wrong = measure_tasks(cases, args)
    if len(measurements) > 1:
        print(f"\n{format_overview(measurements)}", flush=True)
    for line in wrong:
        print(f"WRONG NUMBERS: {line}")
    return 1 if wrong else 0


def measure_tasks(
    cases: Iterable[tuple[str, MeasuredTask, Sequence[MeasuredVariant]]],
    args: argparse.Namespace,
    is_judged: Callable[[MeasuredTask, VariantResult], bool] = lambda task, result: True,
) -> tuple[list[Measurement], list[str]]:
    """Measure one task after the other, print each, and write all that there are so far.

    Arguments:
        cases: title, task and variants.
        args: of the command line: `steps`, `steps_per_turn`, `warm_cache`, `json`.
        is_judged: whether a variant's numbers have to be those of the reference.

    Returns:
        All measurements, and a line for each variant whose numbers are wrong.
    """
    measurements: list[Measurement] = []
    wrong: list[str] = []
    for title, task, chosen in cases:
        print(f"\n== {title}", flush=True)
        measurement = measure(
            task,
            chosen,
            rounds=-(-args.steps // args.steps_per_turn),
            steps_per_turn=args.steps_per_turn,
            cold=not args.warm_cache,
            progress=lambda line: print(f"   {line}", file=sys.stderr, flush=True),
        )
        print(format_measurement(measurement), flush=True)
        measurements.append(measurement)
        wrong += [
            f"{title}: {result.variant} differs at {result.difference.worst or 'the loss'}"
            for result in measurement.results
            if is_judged(task, result) and not result.difference.is_within(task.tolerance)
        ]
        _write(args.json, measurements)  # after each, so that an interrupted run keeps its measurements
    return measurements, wrong


def format_overview(measurements: Sequence[Measurement]) -> str:
    """Return how apollo did in every measurement, and geometric means of those with branches at smaller batches."""
    rows, means = [], []
    for measurement in measurements:
        found, task = measurement.by_variant(), measurement.task.arguments
        if not {"eager", "inductor", "apollo"} <= found.keys():
            continue
        steps = {name: result.summary.median_ns for name, result in found.items()}
        best_inductor = min(steps[mode.name] for mode in INDUCTOR_MODES if mode.name in steps)
        rivals = (steps["inductor"], best_inductor, min(best_inductor, steps["eager"]))
        over_rivals = tuple(rival / steps["apollo"] for rival in rivals)
        over_kept = steps["inductor-kept-memory"] / steps["apollo"] if "inductor-kept-memory" in steps else None
        over_serial = steps["apollo-serial"] / steps["apollo"] if "apollo-serial" in steps else None
        peaks = [found[name].peak_bytes for name in ("apollo", "inductor")]
        memory = peaks[0] / peaks[1] if peaks[0] and peaks[1] else None
        ratios = (*over_rivals, over_kept, over_serial, memory)
        kind = f"{measurement.task.mode}, {measurement.task.dtype}"
        label = f"{task['name']}, batch {task['batch'] or 'of the spec'}, {kind}"
        rows.append((label, *map(_show_ratio, ratios), measurement.cpu))
        if task["name"] in _BRANCHED and task["batch"] in _BATCHES.get(task["name"], _OTHER_BATCHES)[:-1]:
            means.append((*over_rivals, over_serial or 1.0))
    if means:
        *averages, of_lanes = (statistics.geometric_mean(column) for column in zip(*means, strict=True))
        label = f"geometric mean of {len(means)} with branches"
        rows.append((label, *map(_show_ratio, averages), "", _show_ratio(of_lanes), "", ""))
    headers = (
        "",
        "over Inductor",
        "over its best mode",
        "over the best of all",
        "over Inductor with kept memory",
        "lanes over segments in turn",
        "peak memory over Inductor's",
        "CPU",
    )
    table: str = tabulate(rows, headers=headers, colalign=("left", *["right"] * 6, "left"), disable_numparse=True)
    return table


def _show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _write(path: Path | None, measurements: list[Measurement]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine_facts(), "measurements": [to_json(measurement) for measurement in measurements]}
        path.write_text(json.dumps(content, indent=1))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure workloads, interleaved.")
    parser.add_argument(
        "--workloads", type=workloads, default=["two_tower", "clip"], help=f"all, or some of {', '.join(SPECS)}"
    )
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument(
        "--batch", type=batches, default=[None], help="batch sizes, e.g. 1,4, or all; default: the spec's"
    )
    parser.add_argument("--modes", type=names_of(("train", "inference")), default=["train"], help="train, inference")
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        type=names_of(TOLERANCES),
        default=["float32"],
        help="float32, bfloat16: the latter is forward and loss under torch.autocast",
    )
    parser.add_argument("--variants", type=variants, default=list(VARIANTS), help=", ".join(_KNOWN))
    parser.add_argument("--steps", type=int, default=30, help="timed steps of every variant")
    parser.add_argument("--steps-per-turn", type=int, default=3, help="timed steps before the next variant's turn")
    parser.add_argument(
        "--warm-cache", action="store_true", help="use the user's Inductor cache; first steps are not cold"
    )
    parser.add_argument("--json", type=Path, help="write everything there, machine and versions included")
    return parser.parse_args(arguments)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names that refuses unknown ones."""
    choices = list(known)

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(choices)}")
        return text.split(",")

    return parse


def workloads(text: str) -> list[str]:
    """Parse comma-separated names of workloads, or `all`."""
    return list(SPECS) if text == "all" else names_of(SPECS)(text)


def variants(text: str) -> list[MeasuredVariant]:
    """Parse comma-separated names of variants."""
    return [_KNOWN[name] for name in names_of(_KNOWN)(text)]


def batch_sizes(text: str) -> list[int]:
    """Parse comma-separated batch sizes."""
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"a batch has at least one sample, got {text}")
    return sizes


def batches(text: str) -> list[int]:
    """Parse comma-separated batch sizes, or `all`: none, which stands for those of every workload."""
    return [] if text == "all" else batch_sizes(text)


if __name__ == "__main__":
    sys.exit(main())
