"""The short tables that come last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from apollo_compile.units import format_bytes, format_ns
from benchmarks.gpu_suite.race import Result
from benchmarks.gpu_suite.stages import Report
from benchmarks.gpu_suite.targets import best_of, loss_difference, memory_ratio, speed_up, step_ns
from benchmarks.gpu_suite.variants import BASELINES

DRY = (
    "NOT A GPU: a dry run on a CPU with tiny models, to see that the suite works. No figure below is a GPU's, and none "
    "is to be published."
)

WIDTH = 90
"""Characters of a text in a table."""


def format_report(report: Report) -> str:
    """Return the checks that did not pass, a table per workload, and the targets."""
    blocks = [DRY] if report.is_dry else []
    if "gpu" in report.facts:
        facts = report.facts
        blocks.append(f"{facts['gpu']}, driver of CUDA {facts['driver'] / 1000:.1f}, torch {facts['torch']}")
    if report.checks:
        counts = {state: [c for c in report.checks if c.state == state] for state in ("ok", "failed", "skipped")}
        blocks.append("checks: " + ", ".join(f"{len(found)} {state}" for state, found in counts.items()))
        rows = [(check.name, check.state, check.text[:WIDTH]) for check in counts["failed"]]
        if rows:
            blocks.append(_table(rows, ("check", "", "seen")))
    blocks += [format_workload(title, results) for title, results in report.workloads.items()]
    if report.targets:
        rows = [(each.name, each.wanted, each.found, each.state) for each in report.targets]
        blocks.append(_table(rows, ("target", "wanted", "found", "")))
    late = [f"{stage.name}: {stage.state}, {stage.note}" for stage in report.stages if stage.note]
    if late:
        blocks.append("stages that were not done\n" + "\n".join(late))
    return "\n\n".join(blocks + ([DRY] if report.is_dry else []))


def format_workload(title: str, results: Mapping[str, Result]) -> str:
    """Return one row per variant."""
    baseline = best_of(results, BASELINES)
    rows = [_row(results, result, baseline) for result in results.values()]
    headers = (
        title,
        "step",
        f"over {baseline or 'Inductor'}",
        "waiting",
        "device",
        "host",
        "memory",
        "losses",
        "first step",
    )
    return _table(rows, headers)


def _row(results: Mapping[str, Result], result: Result, baseline: str | None) -> tuple[Any, ...]:
    gain = None if baseline is None else speed_up(results, result.name, (baseline,))
    singles = sorted(ns for turn in result.steps_ns for ns in turn)
    memory, ratio = result.memory.get("warm_bytes"), memory_ratio(results, result.name)
    difference = loss_difference(results, result.name)
    step = step_ns(result)
    cells = (
        "" if step is None else format_ns(step),
        "" if gain is None else str(gain),
        format_ns(singles[len(singles) // 2]) if singles else "",
        _ns(result.launch.get("device_ns")),
        _ns(result.launch.get("host_ns")),
        "" if memory is None else f"{format_bytes(memory)}" + ("" if ratio is None else f", {ratio:.2f}x"),
        "" if difference is None else f"{difference:.0e}",
        "" if result.first_step_s is None else f"{result.first_step_s:.0f} s",
    )
    return (result.name, *cells) if not result.note else (result.name, result.note[:WIDTH], *cells[1:])


def _ns(value: int | None) -> str:
    return "" if value is None else format_ns(value)


def _table(rows: list[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    text: str = tabulate(rows, headers=headers, disable_numparse=True)
    return text
