"""Differences between the plans of two reports.

    compare(before, after) -> Difference

Either side is a report, or plans written by `APOLLO_DUMP`, which have no runs and waits. Graphs are matched by name,
and by order among graphs of the same name; segments are matched by name within a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from apollo_compile.ir import Variant
from apollo_compile.ir.text import format_count
from apollo_compile.reports.values import ModelSummary
from apollo_compile.store.plan_file import NamedPlan
from apollo_compile.units import format_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A segment whose lane or quota differs."""

    segment: str
    lanes: tuple[int, int]
    """Lane before and after; all pairs here are (before, after)."""
    units: tuple[int, int]
    predicted_ns: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphDifference:
    """One graph that both reports have."""

    name: str
    variants: tuple[str, str]
    predicted_ns: tuple[int, int]
    serial_ns: tuple[int, int]
    measured_ns: tuple[int | None, int | None]
    num_waits: tuple[int | None, int | None]
    """Numbers of waits; None if unknown."""
    peak_bytes: tuple[int | None, int | None]
    moves: tuple[Move, ...]
    order_changed: bool
    """Whether the common segments start in another order."""
    only_before: tuple[str, ...]
    """Segments that the second report does not have."""
    only_after: tuple[str, ...]

    @property
    def is_same_plan(self) -> bool:
        """Whether segments, lanes, quotas and order are equal; times may differ."""
        return not (self.moves or self.order_changed or self.only_before or self.only_after)


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


class Placed(NamedTuple):
    """A segment in the plan of one side."""

    lane: int
    units: int
    predicted_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A graph of one side."""

    name: str
    variant: str
    predicted_ns: int
    serial_ns: int
    measured_ns: int | None
    num_waits: int | None
    """Number of waits; None if unknown."""
    peak_bytes: int | None
    segments: dict[str, Placed]
    """Segments by name, in start order."""


def sides_of_report(report: ModelSummary) -> tuple[Side, ...]:
    """Return the graphs of a report."""
    return tuple(
        Side(
            name=graph.name,
            variant=graph.variant,
            predicted_ns=graph.predicted_ns,
            serial_ns=graph.serial_ns,
            measured_ns=graph.measured.duration_ns if graph.measured else None,
            num_waits=graph.num_waits,
            peak_bytes=graph.peak_bytes,
            segments={s.name: Placed(s.lane, s.units, s.predicted_ns) for s in graph.segments},
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
            measured_ns=None,
            num_waits=None,
            peak_bytes=None,
            segments={names[a.segment]: Placed(a.lane, a.quota.units, a.duration_ns) for a in plan.in_start_order()},
        )
        for name, names, plan in plans
    )


def compare(before: Iterable[Side], after: Iterable[Side]) -> Difference:
    """Return the differences from `before` to `after`."""
    old, new = _by_name(before), _by_name(after)
    return Difference(
        graphs=tuple(_compare_graphs(old[key], new[key]) for key in old if key in new),
        only_before=tuple(graph.name for key, graph in old.items() if key not in new),
        only_after=tuple(graph.name for key, graph in new.items() if key not in old),
    )


def _by_name(graphs: Iterable[Side]) -> dict[tuple[str, int], Side]:
    """Return graphs by name and number among graphs of the same name, which files may have."""
    seen: Counter[str] = Counter()
    found = {}
    for graph in graphs:
        found[graph.name, seen[graph.name]] = graph
        seen[graph.name] += 1
    return found


def _compare_graphs(before: Side, after: Side) -> GraphDifference:
    old, new = before.segments, after.segments
    both = [name for name in old if name in new]
    return GraphDifference(
        name=before.name,
        variants=(before.variant, after.variant),
        predicted_ns=(before.predicted_ns, after.predicted_ns),
        serial_ns=(before.serial_ns, after.serial_ns),
        measured_ns=(before.measured_ns, after.measured_ns),
        num_waits=(before.num_waits, after.num_waits),
        peak_bytes=(before.peak_bytes, after.peak_bytes),
        moves=tuple(
            Move(
                segment=name,
                lanes=(old[name].lane, new[name].lane),
                units=(old[name].units, new[name].units),
                predicted_ns=(old[name].predicted_ns, new[name].predicted_ns),
            )
            for name in both
            if old[name][:2] != new[name][:2]
        ),
        order_changed=both != [name for name in new if name in old],
        only_before=tuple(name for name in old if name not in new),
        only_after=tuple(name for name in new if name not in old),
    )


def _format_graph(graph: GraphDifference) -> str:
    moved = format_count(len(graph.moves), "segment")
    title = "same plan" if graph.is_same_plan else f"{moved} on another lane or quota"
    lines = [
        f"{graph.name}: {title}",
        f"  predicted {_format_pair(graph.predicted_ns)}; on one lane {_format_pair(graph.serial_ns)}",
    ]
    if graph.measured_ns != (None, None):
        lines.append(f"  measured  {_format_pair(graph.measured_ns)}")
    if graph.variants[0] != graph.variants[1]:
        lines.append(f"  runs {graph.variants[0]}, then {graph.variants[1]}")
    lines += [
        f"  {move.segment}: lane {move.lanes[0]} ({format_count(move.units[0], 'unit')}) -> lane {move.lanes[1]} "
        f"({format_count(move.units[1], 'unit')}), {_format_pair(move.predicted_ns)}"
        for move in graph.moves
    ]
    if graph.order_changed:
        lines.append("  segments start in another order")
    lines += [f"  {name}: only in the first" for name in graph.only_before]
    lines += [f"  {name}: only in the second" for name in graph.only_after]
    return "\n".join(lines)


def _format_pair(pair: tuple[int | None, int | None]) -> str:
    first, second = ("not run" if value is None else format_ns(value) for value in pair)
    return f"{first} -> {second}"
