"""Draw docs/lanes.svg: one measured training step of `two_tower`, on one lane and on lanes.

    python -m benchmarks.picture

The bars are the spans of the step whose duration is the median of many, forward and backward side by side, in one
scale; the two plans take turns.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

import torch

from apollo_compile.ir import Trace
from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.units import NS_PER_MS
from benchmarks.workloads import build

WIDTH, LANE_HEIGHT, LEFT, TOP = 860, 26, 150, 34
COLORS = {"image": "#4c78a8", "text": "#e4873c", "": "#9aa0a6"}
ROWS = {0: "both cores", 1: "core 0", 2: "core 1"}


def main(arguments: list[str] | None = None) -> None:
    """Measure and draw."""
    args = _parse(arguments)
    runs = {
        title: _Run(planner, args.size, args.batch) for title, planner in (("one lane", "serial"), ("lanes", "greedy"))
    }
    for _ in range(args.steps):
        for run in runs.values():  # in turn, so that both meet the same machine
            run.step()
    steps = {title: run.median() for title, run in runs.items()}
    longest = max(sum(trace.duration_ns for _, trace in step) for step in steps.values())
    height = 3 * LANE_HEIGHT + 44
    body = "".join(_draw(title, step, longest, TOP + row * height) for row, (title, step) in enumerate(steps.items()))
    args.svg.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {TOP + 2 * height}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="A training step on one lane and on lanes">'
        f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


class _Run:
    """A model compiled with one planner, and the traces of its steps."""

    def __init__(self, planner: str, size: str, batch: int) -> None:
        self._workload = build("two_tower", size, batch=batch)
        options = {"plan.planner": planner, "plan.autotune": False}
        self._compiled = torch.compile(self._workload.model, backend="apollo", options=options)
        self._steps: list[list[tuple[CompiledGraph, Trace]]] = []

    def step(self) -> None:
        """Take a training step and keep its traces."""
        self._workload.loss(self._compiled(**self._workload.inputs)).backward()
        graphs = registry.find_models(self._workload.model)[0].graphs
        self._steps.append([(graph, graph.trace()) for graph in graphs])

    def median(self) -> list[tuple[CompiledGraph, Trace]]:
        """Return the traces of the step of median duration."""
        ordered = sorted(self._steps, key=lambda step: sum(trace.duration_ns for _, trace in step))
        return ordered[len(ordered) // 2]


def _draw(title: str, step: list[tuple[CompiledGraph, Trace]], longest: int, top: int) -> str:
    total = sum(trace.duration_ns for _, trace in step)
    parts = [f'<text x="8" y="{top - 8}" font-weight="bold">{title}: {total / NS_PER_MS:.1f} ms</text>']
    parts += [f'<text x="8" y="{top + lane * LANE_HEIGHT + 17}">{name}</text>' for lane, name in ROWS.items()]
    begin = 0
    for graph, trace in step:
        for span in trace.spans:
            name = graph.compilation.partition.graph.segments[span.segment].name
            x = LEFT + (begin + span.start_ns) / longest * WIDTH
            width = max(1.0, (span.end_ns - span.start_ns) / longest * WIDTH - 1)
            color = COLORS.get(name.split(".")[0] if "layers" in name else "", COLORS[""])
            parts.append(
                f'<rect x="{x:.1f}" y="{top + span.lane * LANE_HEIGHT + 2}" width="{width:.1f}" '
                f'height="{LANE_HEIGHT - 4}" rx="2" fill="{color}"><title>{html.escape(name)}</title></rect>'
            )
        begin += trace.duration_ns
        border = LEFT + begin / longest * WIDTH
        bottom = top + 3 * LANE_HEIGHT
        parts.append(f'<line x1="{border:.1f}" y1="{top}" x2="{border:.1f}" y2="{bottom}" stroke="#5f6368"/>')
        parts.append(
            f'<text x="{border - 4:.1f}" y="{bottom + 15}" text-anchor="end">{graph.compilation.capture.role}</text>'
        )
    return "".join(parts)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description="Draw a measured training step.")
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=41, help="steps, of which the one of median duration is drawn")
    parser.add_argument("--svg", type=Path, default=Path("docs/lanes.svg"), help="file to draw")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
