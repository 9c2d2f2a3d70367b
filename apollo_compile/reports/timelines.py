"""Timelines of the segments of a graph: serial, predicted, and measured.

make_timelines(compilation, trace) -> (serial, predicted, measured if there was a run)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from apollo_compile.ir import Trace
from apollo_compile.reports.values import CounterChange, SegmentBar, Timeline
from apollo_compile.target.compilation import Compilation


def make_timelines(compilation: Compilation, trace: Trace) -> tuple[Timeline, ...]:
    """Return the timelines of the serial plan, of the plan, and, if there was a run, of the run."""
    plan = compilation.plan
    ends = list(itertools.accumulate(modes[-1].duration_ns for modes in compilation.costs.modes))
    serial = [
        SegmentBar(segment=segment, lane=0, start_ns=start_ns, end_ns=end_ns)
        for segment, (start_ns, end_ns) in enumerate(itertools.pairwise([0, *ends]))
    ]
    planned = [
        SegmentBar(segment=a.segment, lane=a.lane, start_ns=a.start_ns, end_ns=a.end_ns) for a in plan.in_start_order()
    ]
    found = [
        _timeline("serial", serial, plan.serial_ns, compilation),
        _timeline("predicted", planned, plan.makespan_ns, compilation),
    ]
    if trace.spans:
        ran = [SegmentBar(segment=s.segment, lane=s.lane, start_ns=s.start_ns, end_ns=s.end_ns) for s in trace.spans]
        found.append(_timeline("measured", ran, trace.duration_ns, compilation))
    return tuple(found)


def _timeline(
    name: Literal["serial", "predicted", "measured"],
    bars: Sequence[SegmentBar],
    duration_ns: int,
    compilation: Compilation,
) -> Timeline:
    lanes = compilation.plan.lanes
    width = [len(lane.units) for lane in lanes]
    unit_time = sum((bar.end_ns - bar.start_ns) * width[bar.lane] for bar in bars)
    lanes_at_work = _steps([(bar.start_ns, bar.end_ns, 1) for bar in bars])
    overlap_ns = sum(later.time_ns - now.time_ns for now, later in itertools.pairwise(lanes_at_work) if now.value >= 2)
    held = {} if name == "serial" else _lifetimes(compilation, bars, duration_ns)
    return Timeline(
        name=name,
        duration_ns=duration_ns,
        overlap=overlap_ns / duration_ns if duration_ns else 0.0,
        busy=unit_time / (width[0] * duration_ns) if duration_ns else 0.0,
        bars=tuple(bars),
        units=tuple(_steps([(bar.start_ns, bar.end_ns, width[bar.lane]) for bar in bars])),
        memory=tuple(_steps(itertools.chain.from_iterable(held.values()))),
        memory_by_lane=tuple(tuple(_steps(held[lane.id])) for lane in lanes) if held else (),
    )


def _lifetimes(
    compilation: Compilation, bars: Sequence[SegmentBar], duration_ns: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Return, per lane, (start, end, bytes) of every buffer that its segments make, by the memory plan."""
    times = {bar.segment: bar for bar in bars}
    holder = {hold.buffer: hold.segment for hold in compilation.memory.holds}
    found: dict[int, list[tuple[int, int, int]]] = {lane.id: [] for lane in compilation.plan.lanes}
    for buffer in compilation.partition.graph.buffers:
        if buffer.producer in times:
            made, last = times[buffer.producer], times.get(holder.get(buffer.id, -1))
            end_ns = last.end_ns if last else duration_ns
            found[made.lane].append((made.start_ns, end_ns, buffer.num_bytes))
    return found


def _steps(intervals: Iterable[tuple[int, int, int]]) -> list[CounterChange]:
    """Return the changes over time of the sum of all current intervals (start, end, value)."""
    changes: dict[int, int] = defaultdict(int)
    for start_ns, end_ns, value in intervals:
        changes[start_ns] += value
        changes[end_ns] -= value
    level = 0
    found: list[CounterChange] = []
    for time_ns in sorted(changes):
        level += changes[time_ns]
        if not found or found[-1].value != level:
            found.append(CounterChange(time_ns, level))
    return found
