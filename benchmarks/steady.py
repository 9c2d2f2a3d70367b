"""Run many steps of one model and watch that nothing grows: step time, resident memory, threads, open files.

    python -m benchmarks.steady --workload two_tower --size tiny --steps 10000 --svg docs/steady.svg --json out.json

Steps count once the comparison is over, since what competes is compiled then; where times drift so far that it is held
again, they are counted anew, up to `MAX_RESTARTS` times. They are cut into a hundred slices; a slice
has the median of its step times and what the process had at its end. After every step a witness runs: a product of two
matrices, always the same one. Where the machine becomes slower the witness does too, so a step that becomes slower by
itself shows in the step's time over the witness's. Printed are the second and the last tenth beside each other. Exit
code 1: threads or open files grew after the second tenth, or memory by more than `ALLOWED_GROWTH` of it. Times are
printed and drawn, not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_MS, format_bytes
from benchmarks.workloads import build
from benchmarks.workloads.specs import SPECS

SLICES = 100
ALLOWED_GROWTH = 0.02
"""Of resident memory, from the second tenth to the last: allocators settle for a while."""

MAX_RESTARTS = 5
"""A machine whose other users come and go makes times drift for ever."""

WITNESS_SIDE = 384
"""Rows and columns of the witness's matrices: about a millisecond on one core."""

WIDTH, HEIGHT, LEFT, TOP = 860, 150, 80, 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Some steps in a row."""

    last_step: int
    step_ns: float
    witness_ns: float
    """nan where there was none."""
    resident_bytes: int
    num_threads: int
    num_files: int


def main(arguments: list[str] | None = None) -> int:
    """Run, print, draw; return the exit code."""
    args = _parse(arguments)
    slices = watch(*make_step(args.workload, args.size), args.steps, make_witness())
    tenth = max(1, len(slices) // 10)
    parts = {"second tenth": slices[tenth : 2 * tenth], "last tenth": slices[-tenth:]}
    rows = [
        (
            name,
            f"{statistics.median(s.step_ns for s in part) / NS_PER_MS:.3f} ms",
            f"{statistics.median(s.step_ns / s.witness_ns for s in part):.2f}x",
            format_bytes(max(s.resident_bytes for s in part)),
            max(s.num_threads for s in part),
            max(s.num_files for s in part),
        )
        for name, part in parts.items()
    ]
    headers = (f"{args.workload}, {args.size}", "median step", "over witness", "resident", "threads", "files")
    print(tabulate(rows, headers=headers))
    if args.json is not None:
        content = {"machine": machine_facts(), "workload": args.workload, "slices": list(map(asdict, slices))}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.svg is not None:
        args.svg.write_text(draw(slices, f"{args.workload}, {args.size}"), encoding="utf-8")
    problems = find_growth(parts["second tenth"], parts["last tenth"])
    for problem in problems:
        print(f"GREW: {problem}")
    return 1 if problems else 0


def make_step(workload: str, size: str) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a training step with an optimizer, as a user's loop has it, and whether nothing is being decided."""
    built = build(workload, size)
    compiled = torch.compile(built.model, backend="apollo")
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        built.loss(compiled(**built.inputs)).backward()
        optimizer.step()

    return step, lambda: registry.is_settled(built.model)


def make_witness() -> Callable[[], None]:
    """Return work for all cores that takes as long whatever ran before."""
    values = torch.ones(WITNESS_SIDE, WITNESS_SIDE)
    total = torch.empty_like(values)

    def witness() -> None:
        torch.mm(values, values, out=total)

    return witness


def watch(
    step: Callable[[], None], is_settled: Callable[[], bool], steps: int, witness: Callable[[], None]
) -> list[Slice]:
    """Run steps and look at the process now and then, from when all is compiled that competes."""
    step()
    size = max(1, steps // SLICES)
    slices: list[Slice] = []
    num_restarts = 0
    with tqdm(total=steps // size, desc="slices", file=sys.stderr, mininterval=5) as progress:
        while len(slices) < steps // size:
            if not is_settled() and num_restarts <= MAX_RESTARTS:
                num_restarts += 1
                while not is_settled():
                    step()
                slices.clear()
                progress.reset()
            times = [(_time(step), _time(witness)) for _ in range(size)]
            medians = map(statistics.median, zip(*times, strict=True))
            slices.append(look(size * (len(slices) + 1), *medians))
            progress.update()
    return slices


def _time(call: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def look(last_step: int, step_ns: float, witness_ns: float = math.nan) -> Slice:
    """Return what the process has now."""
    return Slice(
        last_step=last_step,
        step_ns=step_ns,
        witness_ns=witness_ns,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        num_threads=len(os.listdir("/proc/self/task")),
        num_files=len(os.listdir("/proc/self/fd")),
    )


def find_growth(early: list[Slice], late: list[Slice]) -> list[str]:
    """Return what the late slices have more of than the early ones."""
    found = []
    for name in ("num_threads", "num_files"):
        before, after = (max(getattr(s, name) for s in part) for part in (early, late))
        if after > before:
            found.append(f"{name} from {before} to {after}")
    before, after = (max(s.resident_bytes for s in part) for part in (early, late))
    if after > before * (1 + ALLOWED_GROWTH):
        found.append(f"resident memory from {format_bytes(before)} to {format_bytes(after)}")
    return found


def draw(slices: list[Slice], title: str) -> str:
    """Return step time, step over witness, and memory over steps as SVG."""
    rows = (
        (f"median step of {title} [ms]", [s.step_ns / NS_PER_MS for s in slices]),
        ("median step / median witness", [s.step_ns / s.witness_ns for s in slices]),
        ("resident memory [MiB]", [s.resident_bytes / 2**20 for s in slices]),
    )
    steps = [s.last_step for s in slices]
    parts = []
    for row, (label, values) in enumerate(rows):
        top, high = TOP + row * (HEIGHT + 50), 1.1 * max(values)
        points = " ".join(
            f"{LEFT + WIDTH * step / steps[-1]:.1f},{top + HEIGHT * (1 - value / high):.1f}"
            for step, value in zip(steps, values, strict=True)
        )
        parts.append(
            f'<text x="{LEFT}" y="{top - 8}">{label}</text>'
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#9aa0a6"/>'
            f'<text x="{LEFT - 6}" y="{top + 12}" text-anchor="end">{high:.4g}</text>'
            f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>'
            f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 16}" text-anchor="end">{steps[-1]} steps</text>'
            f'<polyline points="{points}" fill="none" stroke="#4c78a8" stroke-width="1.5"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {TOP + len(rows) * (HEIGHT + 50)}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="Step time and memory over steps">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady", description="Watch a process over many steps.")
    parser.add_argument("--workload", choices=tuple(SPECS), default="two_tower")
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--svg", type=Path, help="draw step time and memory there")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
