"""Check that a summary from a file is consistent, so that it can be rendered.

check_summary(graph)
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from apollo_compile.reports.values import DeviceSummary, GraphSummary, ModuleSummary, SegmentSummary, Timeline

MAX_UNITS = 2**16
"""More than any device has; a report with larger numbers is damaged."""


def check_summary(graph: GraphSummary) -> None:
    """Raise `ValueError` for an inconsistent summary, which a damaged or foreign file may contain."""
    ids, lanes = set(range(len(graph.segments))), {lane.id: lane.units for lane in graph.lanes}
    branches = {segment.branch for segment in graph.segments}
    for problem, is_legal in (
        ("segments must be numbered from 0", {segment.id for segment in graph.segments} == ids != set()),
        ("segments must depend on segments", all(set(segment.after) <= ids for segment in graph.segments)),
        ("waits must be between segments", all({wait.producer, wait.consumer} <= ids for wait in graph.waits)),
        ("modules must read from modules", _are_indices(graph.modules)),
        ("lanes must be numbered from 0", list(lanes) == list(range(len(graph.lanes))) != []),
        (
            "lane 0 must have units, and those of all must ascend",
            bool(lanes.get(0)) and all(map(_are_units, lanes.values())),
        ),
        ("segments must be on lanes", {segment.lane for segment in graph.segments} <= set(lanes)),
        ("there must be timelines", bool(graph.timelines)),
        (
            "timelines must show segments and memory on lanes",
            all(_is_legal(line, ids, set(lanes)) for line in graph.timelines),
        ),
        ("every segment needs a choice for all units", all(_has_choices(s, graph.device) for s in graph.segments)),
        ("branches must be listed", branches | {m.branch for m in graph.modules} <= set(graph.branches)),
        ("pairs must be of branches", all({pair.first, pair.second} <= branches for pair in graph.pairs)),
    ):
        if not is_legal:
            raise ValueError(f"{graph.name}: {problem}")


def _are_indices(modules: Sequence[ModuleSummary]) -> bool:
    return all(0 <= other < len(modules) for module in modules for other in module.after)


def _are_units(units: Sequence[int]) -> bool:
    return all(0 <= unit < MAX_UNITS for unit in units) and list(units) == sorted(set(units))


def _is_legal(line: Timeline, segments: Set[int], lanes: Set[int]) -> bool:
    return (
        line.duration_ns >= 0
        and len(line.memory_by_lane) in (0, len(lanes))
        and all(
            bar.segment in segments and bar.lane in lanes and 0 <= bar.start_ns <= bar.end_ns <= line.duration_ns
            for bar in line.bars
        )
    )


def _has_choices(segment: SegmentSummary, device: DeviceSummary) -> bool:
    return device.units in {c.units for c in segment.choices} and min(c.duration_ns for c in segment.choices) > 0
