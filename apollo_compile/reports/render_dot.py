"""A report for Graphviz.

ModelSummary -> str

A graph is a cluster whose label lists its lanes with their memory. A segment is a box in the colour of its branch. A
dependency is an arrow: bold if it is a wait between lanes, dashed if other waits imply the wait. A wait whose only
reason is shared units ends in a bar instead of an arrowhead.
"""

from __future__ import annotations

from collections.abc import Mapping

from apollo_compile.ir.text import format_count
from apollo_compile.reports.colors import COLORS, color_of_branches
from apollo_compile.reports.values import GraphSummary, LaneSummary, ModelSummary
from apollo_compile.units import format_bytes, format_ns


def render_dot(report: ModelSummary) -> str:
    """Return a digraph of all graphs."""
    lines = [
        "digraph report {",
        "  rankdir=LR;",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
    ]
    colors = color_of_branches(report)
    for number, graph in enumerate(report.graphs):
        lines += _render_graph(number, graph, colors[number])
    return "\n".join([*lines, "}"]) + "\n"


def _render_graph(number: int, graph: GraphSummary, colors: Mapping[str, int]) -> list[str]:
    style = {(wait.producer, wait.consumer): "bold" if wait.kept else "dashed" for wait in graph.waits}
    title = "\n".join([graph.name, *map(_describe_lane, graph.lanes_used)])
    lines = [f"  subgraph cluster_{number} {{", f"    label={_quote(title)};"]
    for segment in graph.segments:
        measured = "" if segment.measured_ns is None else f", measured {format_ns(segment.measured_ns)}"
        label = "\n".join(
            (
                segment.name,
                f"lane {segment.lane}, {format_count(segment.units, 'unit')}",
                f"{format_ns(segment.predicted_ns)}{measured}",
            )
        )
        lines.append(
            f"    g{number}s{segment.id} [label={_quote(label)}, fillcolor={_quote(COLORS[colors[segment.branch]])}];"
        )
    for segment in graph.segments:
        for other in segment.after:
            line = style.get((other, segment.id), "solid")
            lines.append(f"    g{number}s{other} -> g{number}s{segment.id} [style={line}];")
    flows = {(other, segment.id) for segment in graph.segments for other in segment.after}
    for wait in graph.waits:  # lanes that share units wait for each other without a data dependency
        if wait.kept and (wait.producer, wait.consumer) not in flows:
            arrow = f"g{number}s{wait.producer} -> g{number}s{wait.consumer}"
            lines.append(f"    {arrow} [style=bold, arrowhead=tee, constraint=false];")
    return [*lines, "  }"]


def _describe_lane(lane: LaneSummary) -> str:
    limits = (("took", lane.taken_bytes), ("quota", lane.quota_bytes))
    memory = [f", {name} {format_bytes(value)}" for name, value in limits if value is not None]
    units = format_count(len(lane.units), "unit")
    return f"lane {lane.id} ({units}): planned peak {format_bytes(lane.peak_bytes)}{''.join(memory)}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
