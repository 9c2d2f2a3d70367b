"""Traces keep the rules of the trace-event format, so that Perfetto and chrome://tracing open them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from apollo_compile.reports.summary import summarize
from benchmarks.graphs import WORKLOADS
from tests.reports.reports import report_of, workload_report
from tests.reports.test_summary import NOTHING, compilation

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA["thread_sort_index"] = "sort_index"


def validate(trace: Any) -> None:
    """Check the rules of the format for every event that we write, for events together, and what Perfetto adds.

    Of the format ("Trace Event Format"): phases and their fields; `ts` and `dur` in microseconds, none negative;
    complete events of a thread are nested or apart; a flow's start and end have one name, category and id, the start is
    not later, and `bp: e` binds the end to the slice around it. Of Perfetto: Note [traces for Perfetto].
    """
    assert set(trace) == {"traceEvents", "otherData"}, "times are microseconds; displayTimeUnit only misleads"
    open_flows: dict[int, Any] = {}
    processes: dict[int, int] = {}
    slices = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"], "an event has a name"
        assert isinstance(event["pid"], int) and event["pid"] > 0, "a process has a number, 0 is the idle process"
        assert isinstance(event["tid"], int) and 0 < event["tid"] < 2**31, "a thread has a number, 0 is the idle thread"
        assert processes.setdefault(event["tid"], event["pid"]) == event["pid"], "a thread belongs to one process"
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}, "metadata has the one argument of its name"
            assert "ts" not in event, "metadata has no time"
            continue
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0, "a time is a number, and not negative"
        track = slices[event["pid"], event["tid"]]
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0, "a complete event has a duration"
                track.append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                numbers = event["args"].values()
                assert numbers and all(isinstance(n, int | float) for n in numbers), "a series of a counter has numbers"
            case "s":
                assert event["id"] not in open_flows, "an id is of one flow at a time"
                open_flows[event["id"]] = event
            case "f":
                begin = open_flows.pop(event["id"])
                assert (begin["name"], begin["cat"]) == (event["name"], event["cat"]), "a flow is found by these"
                assert begin["ts"] <= event["ts"], "a flow does not go back in time"
                assert event["bp"] == "e", "without, an end binds to the slice that follows"
            case other:
                pytest.fail(f"event of phase {other!r}")
        if event["ph"] in "sf":
            is_enclosed = any(a <= event["ts"] < b for a, b in track)
            assert is_enclosed, "a slice that was written before is open where a flow begins or ends"
    assert not open_flows, "every flow ends"
    for track in slices.values():
        open_until: list[float] = []
        for begin, end in sorted(track, key=lambda item: (item[0], -item[1])):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "slices are nested or apart"
            open_until.append(end)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_is_valid(workload: str) -> None:
    """What is in it: `test_renderings.py`, and what Perfetto reads from it: `test_perfetto.py`."""
    validate(json.loads(workload_report(workload).to_trace()))


def test_a_trace_without_a_run_has_no_measured_track() -> None:
    """Nor is there anything in the trace of nothing."""
    trace = json.loads(report_of(summarize(compilation(), NOTHING)).to_trace())
    validate(trace)
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {"serial", "predicted"}
    assert json.loads(report_of().to_trace())["traceEvents"] == []
