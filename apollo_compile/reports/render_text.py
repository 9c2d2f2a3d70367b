"""A report for a terminal.

ModelSummary -> str
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from apollo_compile.ir import GraphBreak, Lane, LaneId, Variant, Verdict
from apollo_compile.ir.text import draw_lanes, format_count, mark_source
from apollo_compile.reports.values import GraphSummary, ModelSummary
from apollo_compile.reports.words import (
    NOT_MEASURED_YET,
    NOTHING_YET,
    breaks_by_place,
    describe,
    describe_device,
    describe_search,
    describe_state,
    format_interval,
)
from apollo_compile.units import format_bytes, format_ns


def render_text(report: ModelSummary) -> str:
    """Return the stages, a block per graph, fallbacks with reasons, results of comparisons, and graph breaks."""
    blocks = [describe_state(report.states)] if report.states else []
    blocks += [report.fragments] if report.fragments else []
    blocks += [_render_graph(graph, report) for graph in report.graphs]
    blocks += [f"{name}: falls back to Inductor\n  because {reason}" for name, reason in report.fallbacks]
    blocks += [f"{name}: chosen by measuring\n{_render_verdict(verdict)}" for name, verdict in report.verdicts]
    blocks += [_render_break(found, graphs) for found, graphs in breaks_by_place(report.breaks)]
    return "\n\n".join(blocks) or NOTHING_YET


def _render_graph(graph: GraphSummary, report: ModelSummary) -> str:
    lines = [
        f"{graph.name}: {format_count(len(graph.segments), 'segment')} "
        f"({format_count(graph.num_bodies, 'body', 'bodies')}) on {format_count(graph.num_lanes, 'lane')}, "
        f"{graph.origin} plan",
        f"  predicted {format_ns(graph.predicted_ns)}; on one lane {format_ns(graph.serial_ns)} ({graph.gain:.2f}x); "
        f"no plan is under {format_ns(graph.bound_ns)} (gap {graph.gap:.1%})",
        f"  {describe_search(graph)}",
        f"  {describe_device(graph)}",
    ]
    if graph.variant != Variant.PLAN:
        last = "; measured times are those of the plan's last run" if graph.measured else ""
        lines.append(f"  now runs {graph.variant} instead of its plan{last}")
    if graph.measured is not None:
        lines.append(
            f"  measured  {format_ns(graph.measured.duration_ns)}; two or more lanes busy "
            f"{graph.measured.overlap:.0%} of the time; units busy {graph.measured.busy:.0%}"
        )
    elif graph.is_cold:
        lines.append(f"  {NOT_MEASURED_YET}")
    quota = "" if graph.memory_quota is None else f" of {format_bytes(graph.memory_quota)}"
    lines.append(
        f"  {format_count(graph.num_waits, 'wait')} between lanes ({graph.num_waits_dropped} more implied); "
        f"planned peak between segments {format_bytes(graph.peak_bytes)}{quota}"
    )
    used = {bar.lane for bar in graph.latest.bars}
    lanes = [Lane(id=LaneId(lane.id), units=lane.units) for lane in graph.lanes if lane.id in used]
    spans = [(bar.segment, bar.lane, bar.start_ns, bar.end_ns) for bar in graph.latest.bars]
    timeline = draw_lanes(lanes, spans, graph.latest.duration_ns) if lanes else ""
    words = "\n".join(f"  - {sentence}" for sentence in describe(graph, report)) if graph.segments else ""
    parts = ["\n".join(lines), timeline, _render_lanes(graph), _render_segments(graph), words]
    return "\n\n".join(part for part in parts if part)


def _render_lanes(graph: GraphSummary) -> str:
    """Return a table of the lanes with segments; empty for a single lane without a quota, which the head describes."""
    if graph.num_lanes < 2 and all(lane.taken_bytes is lane.quota_bytes is None for lane in graph.lanes):
        return ""
    rows = [
        (
            f"lane {lane.id}",
            len(lane.units),
            lane.num_segments,
            format_ns(lane.predicted_ns),
            "" if lane.measured_ns is None else format_ns(lane.measured_ns),
            format_bytes(lane.peak_bytes),
            "" if lane.taken_bytes is None else format_bytes(lane.taken_bytes),
            "" if lane.quota_bytes is None else format_bytes(lane.quota_bytes),
        )
        for lane in graph.lanes_used
    ]
    headers = ("", "units", "segments", "predicted busy", "measured", "planned peak", "took", "quota")
    return _table_of_known(rows, headers, "lrrrrrrr")


def _render_segments(graph: GraphSummary) -> str:
    rows = [
        (
            segment.title,
            segment.lane,
            f"{segment.units} of {segment.asked_units}",
            f"{format_ns(segment.predicted_ns)} {mark_source(segment.source)}".rstrip(),
            "" if segment.measured_ns is None else format_ns(segment.measured_ns),
            format_ns(segment.waited_ns) if segment.waited_ns else "",
            segment.bottleneck.value,
        )
        for segment in graph.segments
    ]
    headers = ("segment", "lane", "units of asked", "predicted", "measured", "idle before", "bound by")
    return _table_of_known(rows, headers, "lrrrrrl")


def _render_verdict(verdict: Verdict) -> str:
    if not verdict.is_measured:
        return str(verdict)
    rows = [
        (each.name, format_ns(verdict.time_of(each)), f"{each.ratio:.3f}", format_interval(each), each.num_rounds)
        for each in verdict.standings
    ]
    table = _table_of_known(rows, ("variant", "a step", "to the winner", "90 %", "rounds"), "lrrrr")
    return f"{table}\nmeasured in {verdict.num_steps} steps of {verdict.loop}{verdict.pause}"


def _render_break(found: GraphBreak, graphs: str) -> str:
    lines = [
        f"graph break behind {graphs}: {found.problem}",
        f"  {found.file}:{found.line} in {found.function}: {found.code}",
    ]
    return "\n".join([*lines, *(f"  try: {remedy}" for remedy in found.remedies)])


def _table_of_known(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    """Return the table without empty columns, such as measured times before a run."""
    shown = [column for column in range(len(headers)) if any(row[column] != "" for row in rows)]
    return _table(
        [[row[column] for column in shown] for row in rows],
        [headers[column] for column in shown],
        "".join(align[column] for column in shown),
    )


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    sides = tuple("left" if side == "l" else "right" for side in align)
    table: str = tabulate(rows, headers=headers, colalign=sides if rows else None, disable_numparse=True)
    return table
