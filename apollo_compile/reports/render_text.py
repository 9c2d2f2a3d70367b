"""A report for a terminal.

Report -> str
"""

from __future__ import annotations

from tabulate import tabulate

from apollo_compile.reports.summary import GraphSummary, Report
from apollo_compile.select import PLAN, Verdict
from apollo_compile.text import mark_source
from apollo_compile.units import format_bytes, format_ns


def render_text(report: Report) -> str:
    """Return one block per graph, and a line per graph that Inductor runs."""
    blocks = [_render_graph(graph) for graph in report.graphs]
    blocks += [f"{name}: runs in Inductor, whole\n  because {reason}" for name, reason in report.handed_over]
    blocks += [f"{name}: chosen by measuring\n{_render_verdict(verdict)}" for name, verdict in report.verdicts]
    if not blocks:
        return "nothing compiled for this model has run yet: call the compiled model first"
    return "\n\n".join(blocks)


def _render_graph(graph: GraphSummary) -> str:
    gain = graph.serial_ns / graph.predicted_ns if graph.predicted_ns else 1.0
    lines = [
        f"{graph.name}: {len(graph.segments)} segments ({graph.num_bodies} bodies) on {graph.num_lanes} "
        f"{'lane' if graph.num_lanes == 1 else 'lanes'}, {graph.origin} plan",
        f"  predicted {format_ns(graph.predicted_ns)}; on one lane {format_ns(graph.serial_ns)} ({gain:.2f}x); "
        f"no plan is under {format_ns(graph.bound_ns)} (gap {graph.gap:.1%})",
        f"  {_search(graph)}",
    ]
    if graph.way != PLAN:
        lines.append(f"  does not run its plan now but {graph.way}; measured below is the plan's last run")
    if graph.num_lanes > 1:
        others = ", ".join(f"{name} {format_ns(ns)}" for name, ns in graph.baselines if name != "serial")
        lines.append(f"  by the rules of others: {others}")
    if graph.measured_ns is not None and graph.overlap is not None and graph.busy is not None:
        lines.append(
            f"  measured  {format_ns(graph.measured_ns)}; two lanes or more at work {graph.overlap:.0%} of the time; "
            f"units busy {graph.busy:.0%}"
        )
    lines.append(
        f"  {graph.num_waits} waits between lanes ({graph.num_waits_dropped} more implied); "
        f"planned peak between segments {format_bytes(graph.peak_bytes)}"
    )
    rows = [
        (
            segment.name,
            segment.lane,
            segment.units,
            f"{format_ns(segment.predicted_ns)} {mark_source(segment.source)}".rstrip(),
            "" if segment.measured_ns is None else format_ns(segment.measured_ns),
        )
        for segment in graph.segments
    ]
    headers = ("segment", "lane", "quota (units)", "predicted", "measured")
    table = tabulate(
        rows, headers=headers, colalign=("left", "right", "right", "right", "right"), disable_numparse=True
    )
    return "\n".join([*lines, "", graph.timeline, "", table])


def _render_verdict(verdict: Verdict) -> str:
    rows = [(standing.name, f"{standing.ratio:.3f}", standing.num_rounds) for standing in verdict.standings]
    headers = ("way", "to the winner", "rounds")
    table = tabulate(rows, headers=headers, colalign=("left", "right", "right"), disable_numparse=True)
    step = format_ns(round(verdict.standings[0].step_ns))
    return f"{table}\n{verdict.winner} takes {step} a step; measured in {verdict.num_steps} steps of the training loop"


def _search(graph: GraphSummary) -> str:
    """Say where the plan comes from."""
    if graph.pinned:
        return "read from a plan file"
    parts = [f"best of {len(graph.candidates)} candidates"] if graph.candidates else ["no search"]
    if graph.solver:
        parts.append(f"{graph.solver}, seed {graph.seed}")
    if graph.stopped_early:
        parts.append("stopped by the time limit")
    if graph.num_replans:
        parts.append(f"planned again from measured durations ({graph.num_replans}x)")
    return "; ".join(parts)
