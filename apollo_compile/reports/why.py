"""Reasons for the lane and the start of a segment or a module.

explain_place(report, name) -> its lane, the reason of its start, concurrent segments
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from apollo_compile.ir import Variant
from apollo_compile.ir.text import format_count
from apollo_compile.reports.values import GraphSummary, ModelSummary, SegmentBar, SegmentSummary
from apollo_compile.units import format_ns


def explain_place(report: ModelSummary, name: str) -> str:
    """Return why the segment `name`, or the segments of the module `name`, run where and when they do.

    Raises:
        LookupError: no segment or module has that name.
    """
    found = [(graph, chosen) for graph in report.graphs if (chosen := _find(graph, name))]
    if found:
        return _explain(found, name)
    reasons = [f"{graph}: falls back to Inductor because {reason}" for graph, reason in report.fallbacks]
    names = (known for graph in report.graphs for s in graph.segments for known in (s.name, s.module) if known)
    known = list(dict.fromkeys(names))
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    hint = f"similar: {', '.join(similar)}" if similar else f"known: {', '.join(known[:10])}"
    raise LookupError("\n".join([f"no segment or module is called {name!r}; {hint}", *reasons]))


def _find(graph: GraphSummary, name: str) -> list[SegmentSummary]:
    """Return the segment with that name or title, or the segments of that module, or those that hold it too."""
    named = [segment for segment in graph.segments if name in (segment.name, segment.title)]
    named = named or [s for s in graph.segments if s.module == name or s.module.startswith(f"{name}.")]
    return named or [segment for segment in graph.segments if name in segment.others]


def _explain(found: Sequence[tuple[GraphSummary, Sequence[SegmentSummary]]], name: str) -> str:
    """Return the sentences; the last two are about the graph in which the segments take the most time."""
    graph, chosen = max(found, key=lambda item: sum(segment.predicted_ns for segment in item[1]))
    bars = _planned_bars(graph)
    first = min(chosen, key=lambda segment: (bars[segment.id].start_ns, segment.id))
    place = f"In {graph.name} it" if len(found) > 1 else "It"
    needed, on_lane = _last_before(graph, first, bars)
    start = format_ns(bars[first.id].start_ns)
    by_id = {segment.id: segment.name for segment in graph.segments}
    if on_lane is not None and (needed is None or on_lane.end_ns > needed.end_ns):
        then = f"{place} starts at {start}, when {by_id[on_lane.segment]} has released the units of its lane."
    elif needed is not None:
        then = f"{place} starts at {start}, when {by_id[needed.segment]} has ended, on which it depends."
    else:
        then = f"{place} starts at {start}, since it depends on no other segment."
    return " ".join([_where(found, name), then, _beside(graph, chosen, bars)])


def _where(found: Sequence[tuple[GraphSummary, Sequence[SegmentSummary]]], name: str) -> str:
    graph, (segment, *others) = found[0]
    if len(found) == 1 and not others:
        bar = _planned_bars(graph)[segment.id]
        return (
            f"{segment.name} runs in {graph.name} on lane {segment.lane}, with {_units(segment.units)} of "
            f"{segment.asked_units} requested, planned from {format_ns(bar.start_ns)} to {format_ns(bar.end_ns)}. "
            f"Alone it takes {', '.join(f'{format_ns(each.duration_ns)} on {each.units}' for each in segment.choices)}."
        )
    segments = [segment for _, chosen in found for segment in chosen]
    lanes = sorted({segment.lane for segment in segments})
    return (
        f"{name} is {format_count(len(segments), 'segment')} in {_names([graph.name for graph, _ in found])} on "
        f"{'lane' if len(lanes) == 1 else 'lanes'} {', '.join(map(str, lanes))}, planned for "
        f"{format_ns(sum(segment.predicted_ns for segment in segments))} of work."
    )


def _beside(graph: GraphSummary, chosen: Sequence[SegmentSummary], bars: Mapping[int, SegmentBar]) -> str:
    if graph.variant != Variant.PLAN:
        return f"The graph now runs {graph.variant} instead of its plan; see the verdict."
    ids = {segment.id for segment in chosen}
    own = [bars[segment] for segment in ids]
    shared = {
        other.name: sum(
            max(0, min(a.end_ns, bars[other.id].end_ns) - max(a.start_ns, bars[other.id].start_ns)) for a in own
        )
        for other in graph.segments
        if other.id not in ids
    }
    names = sorted((name for name, shared_ns in shared.items() if shared_ns), key=lambda name: -shared[name])
    if names:
        return f"Concurrent with it: {_names(names)}, for {format_ns(sum(shared.values()))} in total."
    if all(segment.units == graph.device.units for segment in chosen):
        return f"Nothing runs concurrently, since its lane has all {_units(graph.device.units)}."
    return "Nothing runs concurrently."


def _planned_bars(graph: GraphSummary) -> dict[int, SegmentBar]:
    return {bar.segment: bar for bar in next(line for line in graph.timelines if line.name == "predicted").bars}


def _last_before(
    graph: GraphSummary, segment: SegmentSummary, bars: Mapping[int, SegmentBar]
) -> tuple[SegmentBar | None, SegmentBar | None]:
    """Return the bars of the last predecessor, and of the last segment before it on units of its lane."""
    bar, units = bars[segment.id], {lane.id: set(lane.units) for lane in graph.lanes}
    on_lane = [b for b in bars.values() if units[b.lane] & units[segment.lane] and b.end_ns <= bar.start_ns]
    return (
        max((bars[other] for other in segment.after), key=lambda other: other.end_ns, default=None),
        max(on_lane, key=lambda other: other.end_ns, default=None),
    )


def _units(count: int) -> str:
    return format_count(count, "unit")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
