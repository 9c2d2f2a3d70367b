"""Modules and branches of a graph: groups of segments, and the possible overlap of branches.

    name_branches(compilation) -> the branch of every segment
    summarize_modules(...);  summarize_pairs(...)

A branch is a prefix of module names, short enough that there are only a few branches. Two segments are independent if
neither depends on the other, directly or through others. `could_overlap_ns` of two branches is an upper limit of their
overlap: for each branch, add up the segments that are independent of some segment of the other, and take the smaller
sum. A branch also forms a pair with itself, because weight gradients, for example, are independent of the rest of the
backward; there it is half of the sum.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from apollo_compile.ir import SegmentGraph
from apollo_compile.reports.values import ModuleSummary, PairSummary, SegmentSummary, Timeline, total_overlap_ns
from apollo_compile.target.compilation import Compilation

BRANCH_SHARE = 0.9
"""Largest share of the time that a branch should have; names of branches are as short as this allows."""

MAX_BRANCHES = 8

WITHOUT_MODULE = "(no module)"


def name_branches(compilation: Compilation) -> list[str]:
    """Return the branch of every segment, a prefix of its module's name.

    In a whole training step, branches are its phases, since the phases of different micro-batches overlap.
    """
    graph = compilation.partition.graph
    if all(segment.phase is not None for segment in graph.segments):
        return [str(segment.phase) for segment in graph.segments]
    paths = [_path(segment.module) for segment in graph.segments]
    serial = [modes[-1].duration_ns for modes in compilation.costs.modes]
    best = ["(all)"] * len(paths)
    for depth in range(1, max(map(len, paths), default=0) + 1):
        names = [".".join(path[:depth]) or WITHOUT_MODULE for path in paths]
        time_by_name: dict[str, int] = defaultdict(int)
        for name, time_ns in zip(names, serial, strict=True):
            time_by_name[name] += time_ns
        if depth > 1 and len(time_by_name) > MAX_BRANCHES:
            break
        best = names
        if max(time_by_name.values()) <= BRANCH_SHARE * sum(serial):
            break
    return best


def _path(module: str) -> list[str]:
    """Return the parts of a module's name before the number of a layer."""
    return list(itertools.takewhile(lambda part: not part.isdecimal(), module.split("."))) if module else []


def summarize_modules(compilation: Compilation, segments: Mapping[int, SegmentSummary]) -> tuple[ModuleSummary, ...]:
    """Return the modules of a graph in graph order, with sums over their segments."""
    names = [".".join(_path(segment.module)) or WITHOUT_MODULE for segment in compilation.partition.graph.segments]
    members: dict[str, list[SegmentSummary]] = defaultdict(list)
    for segment_id, name in enumerate(names):
        members[name].append(segments[segment_id])
    place = {name: index for index, name in enumerate(members)}
    found = []
    for name, own in members.items():
        before = {place[names[other]] for segment in own for other in segment.after} - {place[name]}
        measured = [segment.measured_ns for segment in own if segment.measured_ns is not None]
        found.append(
            ModuleSummary(
                name=name,
                branch=own[0].branch,
                num_segments=len(own),
                lanes=tuple(sorted({segment.lane for segment in own})),
                predicted_ns=sum(segment.predicted_ns for segment in own),
                serial_ns=sum(segment.choices[-1].duration_ns for segment in own),
                measured_ns=sum(measured) if measured else None,
                after=tuple(sorted(before)),
            )
        )
    return tuple(found)


def summarize_pairs(compilation: Compilation, branch_of: Sequence[str], timeline: Timeline) -> tuple[PairSummary, ...]:
    """Return all pairs of branches, by descending possible overlap; `branch_of` is by segment."""
    graph = compilation.partition.graph
    related = _related(graph)
    fastest = [min(mode.duration_ns for mode in modes) for modes in compilation.costs.modes]
    members: dict[str, int] = defaultdict(int)
    for segment, branch in enumerate(branch_of):
        members[branch] |= 1 << segment
    bars = {branch: [bar for bar in timeline.bars if branch_of[bar.segment] == branch] for branch in members}

    def independent_ns(one: str, other: str) -> int:
        return sum(
            fastest[segment]
            for segment, branch in enumerate(branch_of)
            if branch == one and members[other] & ~related[segment]
        )

    pairs = [
        PairSummary(
            first=first,
            second=second,
            could_overlap_ns=min(independent_ns(first, second), independent_ns(second, first))
            // (2 if first == second else 1),
            overlap_ns=total_overlap_ns(bars[first], bars[second]),
        )
        for first, second in itertools.combinations_with_replacement(members, 2)
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.could_overlap_ns))


def _related(graph: SegmentGraph) -> list[int]:
    """Return, per segment, a bit mask of the segments that it depends on, that depend on it, and itself."""
    before = [0] * len(graph.segments)
    related = [0] * len(graph.segments)
    for segment in graph.segments:
        before[segment.id] = functools.reduce(
            lambda found, other: found | before[other] | 1 << other, graph.predecessors(segment.id), 0
        )
        related[segment.id] |= before[segment.id] | 1 << segment.id
        for other in range(segment.id):
            if before[segment.id] >> other & 1:
                related[other] |= 1 << segment.id
    return related
