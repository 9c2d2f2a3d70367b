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
- The track of a counter is named by its name and its series: "units" with the series "at work" is "units at work".
- There is no `displayTimeUnit`: some versions interpret times in it (google/perfetto#106 and #274).
- The slice at the end of a flow comes before the flow: the importer binds a flow to the slice that is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apollo_compile.reports.values import GraphSummary, ModelSummary, Timeline
from apollo_compile.units import NS_PER_US

Event = dict[str, Any]

_PROCESSES = {"serial": 1, "predicted": 2, "measured": 3}

_THREADS = 1_000
"""Thread ids per process; more than a program has lanes."""


def render_trace(report: ModelSummary) -> dict[str, Any]:
    """Return the trace as plain data."""
    events: list[Event] = []
    for name, process in _PROCESSES.items():
        if not any(line.name == name for graph in report.graphs for line in graph.timelines):
            continue
        events.append(_metadata("process_name", process, {"name": name}))
        events.append(_metadata("process_sort_index", process, {"sort_index": process}))
        for lane, units in _lanes(report).items():
            if name != "serial" or lane == 0:
                label = f"lane {lane} ({units} {'unit' if units == 1 else 'units'})"
                thread = _thread(process, lane)
                events.append(_metadata("thread_name", process, {"name": label}, thread))
                events.append(_metadata("thread_sort_index", process, {"sort_index": lane}, thread))
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


def _lanes(report: ModelSummary) -> dict[int, int]:
    """Return the lanes that any graph uses, with their units."""
    return {
        lane.id: len(lane.units) for graph in report.graphs for lane in graph.lanes if lane.num_segments or lane.id == 0
    }


def _render_timeline(graph: GraphSummary, line: Timeline, begin_ns: int) -> list[Event]:
    process = _PROCESSES[line.name]
    segments = {segment.id: segment for segment in graph.segments}
    events: list[Event] = []
    for bar in line.bars:
        segment = segments[bar.segment]
        events.append(
            {
                "name": segment.name,
                "cat": f"segment,{graph.role.value}",
                "ph": "X",
                "pid": process,
                "tid": _thread(process, bar.lane),
                "ts": _us(begin_ns + bar.start_ns),
                "dur": _us(bar.end_ns - bar.start_ns),
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
        )
    for name, series, steps in _counters(graph, line):
        events += [
            {
                "name": name,
                "ph": "C",
                "pid": process,
                "tid": _thread(process, 0),
                "ts": _us(begin_ns + time_ns),
                "args": {series: value},
            }
            for time_ns, value in steps
        ]
    return events


def _counters(graph: GraphSummary, line: Timeline) -> list[tuple[str, str, Sequence[tuple[int, int]]]]:
    """Return name, series and changes of every counter; bytes that a lane took or may take are constant."""
    found: list[tuple[str, str, Sequence[tuple[int, int]]]] = [
        ("units", "at work", line.units),
        ("bytes", "between segments", line.memory),
    ]
    for lane, steps in zip(graph.lanes, line.memory_by_lane, strict=False):  # empty for the serial plan
        if lane.num_segments:
            found.append((f"lane {lane.id} holds", "bytes", steps))
            limits = (("took", lane.taken_bytes), ("may take", lane.quota_bytes))
            found += [(f"lane {lane.id} {verb}", "bytes", ((0, value),)) for verb, value in limits if value is not None]
    return found


def _render_waits(graph: GraphSummary, line: Timeline, begin_ns: int, first_id: int) -> list[Event]:
    """Return the flows of the kept waits: from the end of the producer to the start of the consumer."""
    bars = {bar.segment: bar for bar in line.bars}
    waits = [w for w in graph.waits if w.kept and w.producer in bars and w.consumer in bars]
    events: list[Event] = []
    for number, wait in enumerate(waits, first_id):
        producer, consumer = bars[wait.producer], bars[wait.consumer]
        process = _PROCESSES[line.name]
        shared = {"name": "wait", "cat": "wait", "id": number, "pid": process}
        # A flow belongs to the slice that encloses it, which excludes the slice's end: hence one nanosecond before.
        leaves_ns = max(producer.start_ns, producer.end_ns - 1)
        events.append({**shared, "ph": "s", "tid": _thread(process, producer.lane), "ts": _us(begin_ns + leaves_ns)})
        thread = _thread(process, consumer.lane)
        events.append({**shared, "ph": "f", "bp": "e", "tid": thread, "ts": _us(begin_ns + consumer.start_ns)})
    return events


def _metadata(name: str, process: int, args: dict[str, Any], thread: int | None = None) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread or _thread(process, 0), "args": args}


def _thread(process: int, lane: int) -> int:
    return process * _THREADS + lane


def _us(time_ns: int) -> float:
    return time_ns / NS_PER_US
