"""Timelines in the trace-event format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

    ModelSummary -> {"traceEvents": [...], ...}

A timeline of a graph is a process, a lane is a thread, a segment is a complete event (`X`), and a kept wait is a flow
(`s` to `f`). Busy units, bytes of live buffers, and per lane the bytes held, taken and allowed are counters (`C`).
Times of the format are microseconds; `args` has the exact nanoseconds. Graphs follow one another in time, as in a step.
Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Note [traces for Perfetto]. Perfetto has requirements beyond the format:
- Thread ids begin at 1 and are unique across processes. Perfetto looks threads up by id, so threads with equal ids lose
  their names (google/perfetto#363), and some versions take thread 0 for thread 1 (google/perfetto#2278).
- Metadata events have no time: they apply from the start (google/perfetto#2048).
- The track of a counter is named by its name and its series: "units" with the series "busy" is "units busy".
- There is no `displayTimeUnit`: some versions interpret times in it (google/perfetto#106 and #274).
- The slice at the end of a flow comes before the flow: the importer binds a flow to the slice that is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from apollo_compile.reports.values import GraphSummary, ModelSummary, Timeline
from apollo_compile.units import NS_PER_US

TraceEvent = dict[str, Any]

_PROCESSES = {"serial": 1, "predicted": 2, "measured": 3}

_THREADS = 100_000
"""Thread ids per process; more than a program has lanes, or a step devices."""


def render_trace(report: ModelSummary) -> dict[str, Any]:
    """Return the trace as plain data."""
    events: list[TraceEvent] = []
    names, lanes = {line.name for graph in report.graphs for line in graph.timelines}, _lanes(report)
    for name, process in _PROCESSES.items():
        if name in names:
            rows = {
                lane: f"lane {lane} ({units} {'unit' if units == 1 else 'units'})"
                for lane, units in lanes.items()
                if name != "serial" or lane == 0
            }
            events += name_tracks(process, name, rows)
    begin_ns, flow = 0, 0
    for graph in report.graphs:
        for line in graph.timelines:
            events += _render_timeline(graph, line, begin_ns)
            if line.name != "serial":
                flows = _render_waits(graph, line, begin_ns, flow)
                flow += len(flows) // 2
                events += flows
        begin_ns += max(line.duration_ns for line in graph.timelines)
    return {"traceEvents": events, "otherData": {"producer": "apollo_compile"}}


def thread_of(process: int, row: int) -> int:
    """Return the thread id of a row of a process."""
    return process * _THREADS + row


def name_tracks(process: int, name: str, rows: Mapping[int, str]) -> Iterator[TraceEvent]:
    """Yield the events that name and order a process and its rows."""
    named = [("process", process, thread_of(process, 0), name)]
    named += [("thread", row, thread_of(process, row), label) for row, label in rows.items()]
    for kind, place, thread, label in named:
        for what, args in (("name", {"name": label}), ("sort_index", {"sort_index": place})):
            yield {"name": f"{kind}_{what}", "ph": "M", "pid": process, "tid": thread, "args": args}


def slice_event(name: str, category: str, process: int, row: int, start_ns: int, end_ns: int) -> TraceEvent:
    """Return a complete event."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread_of(process, row),
        "ts": start_ns / NS_PER_US,
        "dur": (end_ns - start_ns) / NS_PER_US,
    }


def counter_events(name: str, series: str, process: int, steps: Iterable[tuple[int, int]]) -> Iterator[TraceEvent]:
    """Yield the events of a counter, one per change: (nanoseconds, value)."""
    for time_ns, value in steps:
        thread, args = thread_of(process, 0), {series: value}
        yield {"name": name, "ph": "C", "pid": process, "tid": thread, "ts": time_ns / NS_PER_US, "args": args}


def _lanes(report: ModelSummary) -> dict[int, int]:
    """Return the lanes that any graph uses, with their units."""
    return {
        lane.id: len(lane.units) for graph in report.graphs for lane in graph.lanes if lane.num_segments or lane.id == 0
    }


def _render_timeline(graph: GraphSummary, line: Timeline, begin_ns: int) -> Iterator[TraceEvent]:
    process = _PROCESSES[line.name]
    segments = {segment.id: segment for segment in graph.segments}
    category = f"segment,{graph.role.value}"
    for bar in line.bars:
        segment = segments[bar.segment]
        yield {
            **slice_event(segment.name, category, process, bar.lane, begin_ns + bar.start_ns, begin_ns + bar.end_ns),
            "args": {
                "graph": graph.name,
                "segment": segment.id,
                "module": segment.module,
                "start_ns": bar.start_ns,
                "end_ns": bar.end_ns,
                "predicted_ns": segment.predicted_ns,
                "measured_ns": segment.measured_ns,
                "units": segment.units,
                "asked_units": segment.asked_units,
                "bottleneck": segment.bottleneck.value,
            },
        }
    for name, series, steps in _counters(graph, line):
        yield from counter_events(name, series, process, ((begin_ns + time_ns, value) for time_ns, value in steps))


def _counters(graph: GraphSummary, line: Timeline) -> list[tuple[str, str, Sequence[tuple[int, int]]]]:
    """Return name, series and changes of every counter; bytes that a lane took or may take are constant."""
    found: list[tuple[str, str, Sequence[tuple[int, int]]]] = [
        ("units", "busy", line.units),
        ("bytes", "between segments", line.memory),
    ]
    for lane, steps in zip(graph.lanes, line.memory_by_lane, strict=False):  # empty for the serial plan
        if lane.num_segments:
            found.append((f"lane {lane.id} holds", "bytes", steps))
            limits = (("took", lane.taken_bytes), ("may take", lane.quota_bytes))
            found += [(f"lane {lane.id} {verb}", "bytes", ((0, value),)) for verb, value in limits if value is not None]
    return found


def _render_waits(graph: GraphSummary, line: Timeline, begin_ns: int, first_id: int) -> list[TraceEvent]:
    """Return the flows of the kept waits: from the end of the producer to the start of the consumer."""
    bars, process = {bar.segment: bar for bar in line.bars}, _PROCESSES[line.name]
    waits = [w for w in graph.waits if w.kept and w.producer in bars and w.consumer in bars]
    events: list[TraceEvent] = []
    for number, wait in enumerate(waits, first_id):
        producer, consumer = bars[wait.producer], bars[wait.consumer]
        # A flow belongs to the slice that encloses it, which excludes the slice's end: hence one nanosecond before.
        leaves_ns = max(producer.start_ns, producer.end_ns - 1)
        for end, lane, time_ns in (
            ({"ph": "s"}, producer.lane, leaves_ns),
            (_ARRIVES, consumer.lane, consumer.start_ns),
        ):
            place = {"pid": process, "tid": thread_of(process, lane), "ts": (begin_ns + time_ns) / NS_PER_US}
            events.append({"name": "wait", "cat": "wait", "id": number, **end, **place})
    return events


_ARRIVES = {"ph": "f", "bp": "e"}
"""The end of a flow, at the slice that encloses it."""
