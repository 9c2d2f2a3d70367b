"""Traces keep the rules of the trace-event format, so that Perfetto and chrome://tracing open them."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from typing import Any

import pytest

from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from benchmarks.graphs import WORKLOADS
from tests.reports.reports import workload_report
from tests.reports.test_summary import NOTHING, compilation

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA["thread_sort_index"] = "sort_index"


def validate(trace: Any) -> None:
    """Check what the format asks of every event that we write, and of events together."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    open_flows: dict[int, Any] = {}
    slices = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        match event["ph"]:
            case "M":
                assert set(event["args"]) == {METADATA[event["name"]]}
            case "X":
                assert event["dur"] >= 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
            case "s":
                assert event["id"] not in open_flows
                open_flows[event["id"]] = event
            case "f":
                begin = open_flows.pop(event["id"])
                assert (begin["name"], begin["cat"]) == (event["name"], event["cat"])
                assert begin["ts"] <= event["ts"] and event["bp"] == "e"
            case other:
                pytest.fail(f"event of phase {other!r}")
    assert not open_flows
    for track in slices.values():  # complete events of a thread are nested or apart
        track.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(track))
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            assert any(a <= event["ts"] <= b for a, b in slices[event["pid"], event["tid"]])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_is_valid_and_has_every_segment_on_every_track(workload: str) -> None:
    """Serial, predicted and measured; times in microseconds, as in the report."""
    report = workload_report(workload)
    trace = json.loads(report.to_trace())
    validate(trace)
    events = trace["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["serial", "predicted", "measured"]
    counts = Counter(event["pid"] for event in events if event["ph"] == "X")
    num_segments = sum(len(graph.segments) for graph in report.graphs)
    assert counts == dict.fromkeys(processes.values(), num_segments)
    flows = sum(event["ph"] == "s" for event in events)
    assert flows == 2 * sum(graph.num_waits for graph in report.graphs)
    first = report.graphs[0].timelines[1]
    found = [e for e in events if e["ph"] == "X" and e["pid"] == processes["predicted"]][: len(first.bars)]
    assert [(e["ts"], e["tid"]) for e in found] == [(bar.start_ns / 1000, bar.lane) for bar in first.bars]


def test_a_trace_without_a_run_has_no_measured_track() -> None:
    """Nor is there anything in the trace of nothing."""
    trace = json.loads(Report(graphs=(summarize(compilation(), NOTHING),), handed_over=()).to_trace())
    validate(trace)
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {"serial", "predicted"}
    assert json.loads(Report(graphs=(), handed_over=()).to_trace())["traceEvents"] == []


def test_the_validator_refuses_broken_traces() -> None:
    """Else it would show nothing."""
    trace = json.loads(workload_report("clip").to_trace())
    for change in ({"dur": -1}, {"ts": None}, {"ph": "Z"}, {"pid": "1"}):
        events = [dict(event) for event in trace["traceEvents"]]
        next(event for event in events if event["ph"] == "X").update(change)
        with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
            validate({**trace, "traceEvents": events})
    unfinished = [event for event in trace["traceEvents"] if event["ph"] != "f"]
    with pytest.raises(AssertionError):
        validate({**trace, "traceEvents": unfinished})
