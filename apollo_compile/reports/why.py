"""Why a segment or a module runs where and when it does, by its plan.

explain_place(report, name) -> at most three sentences: where, why then, what runs beside it
explain_place(report, name, verbose=True) -> a paragraph per segment
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from apollo_compile.ir.text import format_count
from apollo_compile.ir.variants import OWN_PLANS
from apollo_compile.reports.values import Bar, Bottleneck, GraphSummary, ModelSummary, SegmentSummary
from apollo_compile.units import format_ns


def explain_place(report: ModelSummary, name: str, *, verbose: bool = False) -> str:
    """Return why the segment `name`, or the segments of the module `name`, run where they do.

    Raises:
        LookupError: nothing has that name.
    """
    found = [(graph, chosen) for graph in report.graphs if (chosen := _find(graph, name))]
    if found and verbose:
        return "\n\n".join(_explain_segment(graph, segment) for graph, chosen in found for segment in chosen)
    if found:
        return _explain_briefly(found, name)
    reasons = [f"{graph}: runs in Inductor, whole, because {reason}" for graph, reason in report.fallbacks]
    known = [known for graph in report.graphs for s in graph.segments for known in (s.name, s.module) if known]
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    hint = f"similar: {', '.join(similar)}" if similar else f"known: {', '.join(list(dict.fromkeys(known))[:10])}"
    raise LookupError("\n".join([f"no segment or module is called {name!r}; {hint}", *reasons]))


def _find(graph: GraphSummary, name: str) -> list[SegmentSummary]:
    """Return the segment with that name, or the segments of the module with that name."""
    named = [segment for segment in graph.segments if segment.name == name]
    return named or [s for s in graph.segments if s.module == name or s.module.startswith(f"{name}.")]


# --------------------------------------------------------------------------------------------------------- in short


def _explain_briefly(found: Sequence[tuple[GraphSummary, Sequence[SegmentSummary]]], name: str) -> str:
    """Return three sentences; the last two are about the graph in which the segments take most."""
    graph, chosen = max(found, key=lambda item: sum(segment.predicted_ns for segment in item[1]))
    bars = _planned_bars(graph)
    first = min(chosen, key=lambda segment: (bars[segment.id].start_ns, segment.id))
    place = f"In {graph.name} it" if len(found) > 1 else "It"
    needed, on_lane = _last_before(graph, first, bars)
    start = format_ns(bars[first.id].start_ns)
    by_id = {segment.id: segment.name for segment in graph.segments}
    if on_lane is not None and (needed is None or on_lane.end_ns > needed.end_ns):
        then = f"{place} starts at {start}, when {by_id[on_lane.segment]} has left the units of its lane."
    elif needed is not None:
        then = f"{place} starts at {start}, when {by_id[needed.segment]} has ended, which it needs."
    else:
        then = f"{place} starts at {start}, for it needs no other segment."
    return " ".join([_where(found, name), then, _beside(graph, chosen, bars)])


def _where(found: Sequence[tuple[GraphSummary, Sequence[SegmentSummary]]], name: str) -> str:
    graph, (segment, *others) = found[0]
    if len(found) == 1 and not others:
        bar = _planned_bars(graph)[segment.id]
        return (
            f"{segment.name} runs in {graph.name} on lane {segment.lane}, with {_units(segment.units)} of "
            f"{segment.asked_units} asked for, from {format_ns(bar.start_ns)} to {format_ns(bar.end_ns)} by plan."
        )
    segments = [segment for _, chosen in found for segment in chosen]
    lanes = sorted({segment.lane for segment in segments})
    return (
        f"{name} is {format_count(len(segments), 'segment')} in {_names([graph.name for graph, _ in found])} on "
        f"{'lane' if len(lanes) == 1 else 'lanes'} {', '.join(map(str, lanes))}, planned for "
        f"{format_ns(sum(segment.predicted_ns for segment in segments))} of work."
    )


def _beside(graph: GraphSummary, chosen: Sequence[SegmentSummary], bars: Mapping[int, Bar]) -> str:
    if graph.variant not in OWN_PLANS:
        return f"The graph does not run its plan now but {graph.variant}: see the verdict."
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
        return f"Beside it run {_names(names)}, for {format_ns(sum(shared.values()))} in all."
    if all(segment.units == graph.device.units for segment in chosen):
        return f"Nothing runs beside it, for its lane has all {_units(graph.device.units)}."
    return "Nothing runs beside it."


def _planned_bars(graph: GraphSummary) -> dict[int, Bar]:
    return {bar.segment: bar for bar in next(line for line in graph.timelines if line.name == "predicted").bars}


def _last_before(
    graph: GraphSummary, segment: SegmentSummary, bars: Mapping[int, Bar]
) -> tuple[Bar | None, Bar | None]:
    """Return the bar that ends last of the segments it needs, and of those before it on units of its lane."""
    bar, units = bars[segment.id], {lane.id: set(lane.units) for lane in graph.lanes}
    on_lane = [b for b in bars.values() if units[b.lane] & units[segment.lane] and b.end_ns <= bar.start_ns]
    return (
        max((bars[other] for other in segment.after), key=lambda other: other.end_ns, default=None),
        max(on_lane, key=lambda other: other.end_ns, default=None),
    )


# ---------------------------------------------------------------------------------------------------------- in full


def _explain_segment(graph: GraphSummary, segment: SegmentSummary) -> str:
    bars = _planned_bars(graph)
    bar = bars[segment.id]
    by_id = {other.id: other for other in graph.segments}
    lines = [
        f"{segment.name} in {graph.name}: lane {segment.lane}, {_units(segment.units)} granted, "
        f"{_units(segment.asked_units)} asked; planned from {format_ns(bar.start_ns)} to {format_ns(bar.end_ns)}"
    ]
    times = ", ".join(f"{format_ns(choice.duration_ns)} on {choice.units}" for choice in segment.choices)
    lines.append(f"  Alone it takes {times} ({segment.choices[-1].source.value}); it is bound by {_bound_by(segment)}.")
    last_needed, last_on_lane = _last_before(graph, segment, bars)
    if last_needed is None:
        lines.append("  It depends on no other segment.")
    else:
        which = "which" if len(segment.after) == 1 else "the last of which"
        lines.append(
            f"  It needs {_names([by_id[other].name for other in segment.after])}, {which} ends at "
            f"{format_ns(last_needed.end_ns)}."
        )
    if last_on_lane is not None and (last_needed is None or last_on_lane.end_ns > last_needed.end_ns):
        earlier = by_id[last_on_lane.segment].name
        lines.append(f"  Units of its lane are at work on {earlier} until {format_ns(last_on_lane.end_ns)}.")
    beside = [
        other
        for other in bars.values()
        if other.segment != segment.id and other.start_ns < bar.end_ns > bar.start_ns and other.end_ns > bar.start_ns
    ]
    if beside:
        lines.append(f"  Beside it run {_names([by_id[other.segment].name for other in beside])}.")
    else:
        lines.append("  Nothing runs beside it.")
    if segment.units < segment.asked_units:
        fastest = min(choice.duration_ns for choice in segment.choices)
        lines.append(
            f"  With {_units(segment.asked_units)} it would take {format_ns(fastest)}, but what runs beside it would "
            f"have to wait: in sum the plan is {graph.gain:.2f}x as fast as one lane."
        )
    if graph.variant not in OWN_PLANS:
        lines.append(f"  The graph does not run its plan now but {graph.variant}: see the verdict.")
    return "\n".join(lines)


def _units(count: int) -> str:
    return format_count(count, "unit")


def _bound_by(segment: SegmentSummary) -> str:
    if segment.bottleneck is Bottleneck.WAITING:
        return f"waiting, {format_ns(segment.waited_ns)} before it starts"
    share = {
        Bottleneck.MEMORY: segment.memory_share,
        Bottleneck.LAUNCH: segment.launch_share,
        Bottleneck.COMPUTE: 1 - segment.memory_share - segment.launch_share,
    }[segment.bottleneck]
    return f"{segment.bottleneck.value} ({share:.0%})"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
