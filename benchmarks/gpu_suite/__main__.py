"""Check and measure a GPU in ten minutes.

    python -m benchmarks.gpu_suite --json gpu.json
    python -m benchmarks.gpu_suite --device cpu --json build/dry.json

Stages, each with its part of the time (`plan.py`): the device; checks; one stage per workload, in which all variants
compile at the same time and are then measured in turns; a ledger of memory and kernels. The JSON file is written after
every stage. A short table comes last, with the targets.

Exit codes: 0, all is well; 1, a check failed, a variant has wrong losses, or apollo did not run; 3, there is no GPU,
and nothing was measured. A missed target is a figure, not a failure. In a dry run whatever is missing is a failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apollo_compile.tools.bench.task import MeasuredVariant
from benchmarks.gpu_suite import dry
from benchmarks.gpu_suite.device import DeviceProcess
from benchmarks.gpu_suite.plan import BUDGET_S, DEFAULT_WORKLOADS, Suite, Workload
from benchmarks.gpu_suite.race import LOOP_STEPS, MOST_ROUNDS, Result
from benchmarks.gpu_suite.stages import Report, run_stages
from benchmarks.gpu_suite.tables import DRY, format_report
from benchmarks.gpu_suite.targets import TOLERANCES, judge, loss_difference
from benchmarks.gpu_suite.variants import APOLLO, APOLLO_STEP, SLOW, VARIANTS
from benchmarks.run import names_of
from benchmarks.workloads.gpu import NAMES

NO_GPU = 3
"""Exit code where there is none."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"scale": "full", "budget": BUDGET_S, "rounds": MOST_ROUNDS, "loop_steps": LOOP_STEPS},
    "cpu": {"scale": "least", "budget": dry.BUDGET_S, "rounds": dry.ROUNDS, "loop_steps": dry.LOOP_STEPS},
}
"""Of what was not said, by device."""

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None, *, variants: Mapping[str, MeasuredVariant] = VARIANTS) -> int:
    """Check, measure, print tables, write JSON; return the exit code."""
    args = _parse(arguments, variants)
    is_dry = args.device == "cpu"
    if is_dry:
        print(DRY, flush=True)
    elif not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device, so nothing was checked or measured")
        return NO_GPU
    report = Report(is_dry=is_dry)
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apollo-gpu-suite-")))
        folder.mkdir(parents=True, exist_ok=True)
        process = stack.enter_context(DeviceProcess(args.device, folder))
        suite = stack.enter_context(Suite(args, variants, folder, process, time.monotonic))
        write = partial(_write, args.json, args.dtype)
        run_stages(suite.stages(), report, budget_s=args.budget, clock=time.monotonic, write=write, tell=_tell)
        suite.checks.skip_rest(report)
        write(report)
    print(format_report(report))
    complaints = complaints_about(report, args.dtype)
    if is_dry:
        complaints += dry.complaints_about(
            report,
            variants={suite.title_of(each): [v.name for v in suite.variants_of(each)] for each in args.workloads},
            ledger=[variant.name for variant in suite.in_ledger()],
            has_targets=args.variants is None and args.workloads == list(DEFAULT_WORKLOADS),
        )
    print("".join(f"\n{line}" for line in complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


def complaints_about(report: Report, dtype: str) -> list[str]:
    """Return what is wrong: checks that failed, losses that are not the reference's, apollo that did not run."""
    complaints = [f"check {check.name} failed" for check in report.checks if check.state == "failed"]
    for title, results in report.workloads.items():
        for name, result in results.items():
            difference = loss_difference(results, name)
            if difference is not None and not difference <= TOLERANCES[dtype]:
                complaints.append(f"{title}: losses of {name} are {difference:.1e} apart from the reference's")
            if name in (APOLLO, APOLLO_STEP) and result.note:
                complaints.append(f"{title}: {name} did not run: {result.note}")
    return complaints


def _write(path: Path | None, dtype: str, report: Report) -> None:
    workloads: dict[str, dict[str, Result]] = report.workloads
    report.targets = judge(workloads, dtype=dtype, is_dry=report.is_dry)
    if path is not None:
        report.write(path)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None, variants: Mapping[str, MeasuredVariant]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description="Check and measure a GPU.")
    default = ",".join(f"{name}:{batch}" for name, batch in DEFAULT_WORKLOADS)
    parser.add_argument("--json", type=Path, help="write everything there, after every stage")
    parser.add_argument("--keep", type=Path, help="a new folder, which keeps output and caches of all processes")
    parser.add_argument("--budget", type=float, help=f"seconds for everything; default: {BUDGET_S:.0f}")
    parser.add_argument(
        "--workloads", type=_workloads, default=list(DEFAULT_WORKLOADS), help=f"name:batch, ...; default: {default}"
    )
    parser.add_argument(
        "--variants",
        type=names_of(variants),
        help=f"of {', '.join(variants)}; default: all, but {', '.join(SLOW)} of the first workload alone",
    )
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bf16", help="bf16 is autocast")
    parser.add_argument("--rounds", type=int, help=f"at most so many turns of every variant; default: {MOST_ROUNDS}")
    parser.add_argument("--loop-steps", type=int, help=f"steps of a loop without waits; default: {LOOP_STEPS}")
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="workloads only")
    parser.add_argument("--no-ledger", dest="ledger", action="store_false", help="no profile, no ledger of memory")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="all variants of every workload, and 1,000 replays of each in T4; minutes more",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a dry run with tiny models and few steps, whose figures mean nothing",
    )
    args = parser.parse_args(arguments)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.device == "cpu" and args.json is not None and RESULTS in args.json.resolve().parents:
        parser.error(f"{args.json} is among published results, and a dry run has none: write it elsewhere")
    return args


def _workloads(text: str) -> list[Workload]:
    """Parse `name:batch, ...`."""
    found = []
    for part in text.split(","):
        name, _, batch = part.strip().partition(":")
        if name not in NAMES or not batch.isdigit() or int(batch) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no workload; write name:batch, of {', '.join(NAMES)}")
        found.append((name, int(batch)))
    return found


if __name__ == "__main__":
    sys.exit(main())
