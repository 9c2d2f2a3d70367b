"""Differences between the plans of two reports.

    compare(before, after) -> Difference

Either side is a report, or plans written by `APOLLO_DUMP`, which have no runs and waits. Graphs are matched by name,
and by order among graphs of the same name; segments are matched by name within a graph. Dynamo goes on counting
where a model is compiled again in a process: if no name is on both sides, its numbers in the names are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from apollo_compile.ir import Variant
from apollo_compile.ir.text import format_count
from apollo_compile.reports.values import ModelSummary
from apollo_compile.store.plan_file import NamedPlan
from apollo_compile.units import format_ns


class PlacedSegment(NamedTuple):
    """A segment in the plan of one side."""

    lane: int
    units: int
    predicted_ns: int

    def __str__(self) -> str:
        return f"lane {self.lane} ({format_count(self.units, 'unit')})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A graph of one side."""

    name: str
    variant: str
    predicted_ns: int
    serial_ns: int
    measured_ns: int | None = None
    segments: dict[str, PlacedSegment]
    """Segments by name, in start order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphDifference:
    """One graph that both sides have."""

    before: Side
    after: Side
    moved: tuple[str, ...]
    """Segments whose lane or quota differs."""
    order_changed: bool
    """Whether the common segments start in another order."""
    only_before: tuple[str, ...]
    """Segments that the second side does not have."""
    only_after: tuple[str, ...]

    @property
    def is_same_plan(self) -> bool:
        """Whether segments, lanes, quotas and order are equal; times may differ."""
        return not (self.moved or self.order_changed or self.only_before or self.only_after)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Differences between two reports; prints as text."""

    graphs: tuple[GraphDifference, ...]
    only_before: tuple[str, ...]
    """Graphs that the second report does not have."""
    only_after: tuple[str, ...]

    @property
    def is_same_plan(self) -> bool:
        """Whether both reports have the same plans for the same graphs."""
        return not self.only_before and not self.only_after and all(graph.is_same_plan for graph in self.graphs)

    def __str__(self) -> str:
        blocks = [_format_graph(graph) for graph in self.graphs]
        blocks += [f"{name}: only in the first" for name in self.only_before]
        blocks += [f"{name}: only in the second" for name in self.only_after]
        return "\n\n".join(blocks) or "no graph in either"


def sides_of_report(report: ModelSummary) -> tuple[Side, ...]:
    """Return the graphs of a report."""
    return tuple(
        Side(
            name=graph.name,
            variant=graph.variant,
            predicted_ns=graph.predicted_ns,
            serial_ns=graph.serial_ns,
            measured_ns=graph.measured.duration_ns if graph.measured else None,
            segments={s.name: PlacedSegment(s.lane, s.units, s.predicted_ns) for s in graph.segments},
        )
        for graph in report.graphs
    )


def sides_of_plans(plans: Iterable[NamedPlan]) -> tuple[Side, ...]:
    """Return the graphs of plans in files."""
    return tuple(
        Side(
            name=name,
            variant=Variant.PLAN,
            predicted_ns=plan.makespan_ns,
            serial_ns=plan.serial_ns,
            segments={
                names[a.segment]: PlacedSegment(a.lane, a.quota.units, a.duration_ns) for a in plan.in_start_order()
            },
        )
        for name, names, plan in plans
    )


def compare(before: Iterable[Side], after: Iterable[Side]) -> Difference:
    """Return the differences from `before` to `after`."""
    old, new = _by_name(before), _by_name(after)
    if old.keys().isdisjoint(new):
        number = r"\d+/\d+(\.\d+)? "
        old, new = _by_name(old.values(), number), _by_name(new.values(), number)
    return Difference(
        graphs=tuple(_compare_graphs(old[key], new[key]) for key in old if key in new),
        only_before=tuple(graph.name for key, graph in old.items() if key not in new),
        only_after=tuple(graph.name for key, graph in new.items() if key not in old),
    )


def _by_name(graphs: Iterable[Side], left_out: str = "") -> dict[tuple[str, int], Side]:
    """Return graphs by name, without a pattern at its beginning, and number among graphs of that name."""
    seen: Counter[str] = Counter()
    found = {}
    for graph in graphs:
        name = re.sub(f"^{left_out}", "", graph.name)
        found[name, seen[name]] = graph
        seen[name] += 1
    return found


def _compare_graphs(before: Side, after: Side) -> GraphDifference:
    old, new = before.segments, after.segments
    both = [name for name in old if name in new]
    return GraphDifference(
        before=before,
        after=after,
        moved=tuple(name for name in both if old[name][:2] != new[name][:2]),
        order_changed=both != [name for name in new if name in old],
        only_before=tuple(name for name in old if name not in new),
        only_after=tuple(name for name in new if name not in old),
    )


def _format_graph(graph: GraphDifference) -> str:
    before, after = graph.before, graph.after
    moved = f"{format_count(len(graph.moved), 'segment')} on another lane or quota"
    lines = [
        f"{before.name}: {'same plan' if graph.is_same_plan else moved}",
        f"  predicted {_format_pair(before.predicted_ns, after.predicted_ns)}; "
        f"on one lane {_format_pair(before.serial_ns, after.serial_ns)}",
    ]
    if (before.measured_ns, after.measured_ns) != (None, None):
        lines.append(f"  measured  {_format_pair(before.measured_ns, after.measured_ns)}")
    if before.variant != after.variant:
        lines.append(f"  runs {before.variant}, then {after.variant}")
    for name in graph.moved:
        old, new = before.segments[name], after.segments[name]
        lines.append(f"  {name}: {old} -> {new}, {_format_pair(old.predicted_ns, new.predicted_ns)}")
    if graph.order_changed:
        lines.append("  segments start in another order")
    lines += [f"  {name}: only in the first" for name in graph.only_before]
    lines += [f"  {name}: only in the second" for name in graph.only_after]
    return "\n".join(lines)


def _format_pair(*pair: int | None) -> str:
    return " -> ".join("not run" if value is None else format_ns(value) for value in pair)
