"""A number in two renderings is the same number: it was computed once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from apollo_compile.units import format_bytes, format_ns
from benchmarks.graphs import WORKLOADS
from tests.reports.reports import VERDICT, workload_report

ROWS = (
    "data-s", "data-lane", "data-change", "data-module", "data-candidate", "data-variant", "data-line"
)  # fmt: skip
"""Attributes that say what the numbers of a row, or of the head of a timeline, belong to."""


class Numbers(HTMLParser):
    """Collects, per graph, the numbers of tiles, of timelines and of rows of tables, each with its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.graphs: list[dict[str, list[tuple[float, str]]]] = []
        self.rows: list[dict[tuple[str, str], list[tuple[float, str]]]] = []
        self._title = ""
        self._row: tuple[str, str] | None = None
        self._value: float | None = None
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "section" and found.get("class") == "graph":
            self.graphs.append({})
            self.rows.append({})
        if tag == "tr" or "data-line" in found:
            keys = [(key, found[key] or "") for key in ROWS if key in found]
            self._row = keys[0] if keys else None
        self._tag = tag
        self._value = float(found["data-v"] or "") if "data-v" in found else None

    def handle_data(self, data: str) -> None:
        if self._tag == "dt":
            self._title = data
        if self._value is None or not self.graphs:
            return
        if self._row is not None:
            self.rows[-1].setdefault(self._row, []).append((self._value, data))
        elif self._title:
            self.graphs[-1].setdefault(self._title, []).append((self._value, data))
        self._value = None

    def handle_endtag(self, tag: str) -> None:
        if tag == "dl":
            self._title = ""
        if tag in ("tr", "h4"):
            self._row = None
        self._tag = ""


@pytest.mark.parametrize("workload", WORKLOADS)
def test_text_json_page_and_trace_have_the_same_numbers(workload: str) -> None:
    """Of every graph, segment, lane and comparison, for all six workloads; counters of traces: `test_perfetto.py`."""
    report = replace(workload_report(workload), verdicts=(("0/0", VERDICT),))
    text, page = str(report), Numbers(report.to_html())
    *blocks, verdict = re.split(r"\n\n(?=\S+_(?:forward|backward): |0/0: )", text)
    events = [event for event in json.loads(report.to_trace())["traceEvents"] if event["ph"] == "X"]
    graphs = json.loads(report.to_json())["report"]["graphs"]
    assert len(blocks) == len(page.graphs) == len(graphs) == 2
    for block, tiles, rows, graph, summary in zip(blocks, page.graphs, page.rows, graphs, report.graphs, strict=True):
        lines = {line["name"]: line for line in graph["timelines"]}
        titles = {segment.id: segment.title for segment in summary.segments}
        table = [re.split(r"\s{2,}", line) for line in block.splitlines()]
        ran = lines["measured"]
        for title, value, shown in (
            ("Predicted", graph["predicted_ns"], format_ns(graph["predicted_ns"])),
            ("On one lane", graph["serial_ns"], format_ns(graph["serial_ns"])),
            ("No plan under", graph["bound_ns"], format_ns(graph["bound_ns"])),
            ("Measured", ran["duration_ns"], format_ns(ran["duration_ns"])),
            ("Overlap", ran["overlap"], f"{ran['overlap']:.0%}"),
            ("Units busy", ran["busy"], f"{ran['busy']:.0%}"),
            ("Waits", sum(wait["kept"] for wait in graph["waits"]), str(sum(wait["kept"] for wait in graph["waits"]))),
            ("Planned peak", graph["peak_bytes"], format_bytes(graph["peak_bytes"])),
        ):
            assert tiles[title][0] == (value, shown)
            assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", block), (title, shown)
        assert tiles["No plan under"][1] == (graph["gap"], f"{graph['gap']:.1%}")
        assert f"(gap {graph['gap']:.1%})" in block
        for segment in graph["segments"]:
            keys = ("lane", "units", "asked_units", "predicted_ns", "measured_ns", "waited_ns", "memory_bytes")
            shown = [str(segment[key]) for key in keys[:3]] + [format_ns(segment[key]) for key in keys[3:6]]
            shown.append(format_bytes(segment["memory_bytes"]))
            assert rows["data-s", str(segment["id"])] == list(zip(map(segment.get, keys), shown, strict=True))
            (words,) = [words for words in table if words[0] == titles[segment["id"]]]
            assert words[1] == shown[0] and words[2] == f"{shown[1]} of {shown[2]}"
            assert words[3].rstrip(" *~") == shown[3] and words[4] == shown[4]
            assert words[-1] == segment["bottleneck"]
        used = [lane for lane in graph["lanes"] if lane["num_segments"]]
        for lane in used:
            numbers = (lane["id"], len(lane["units"]), lane["num_segments"])
            shown = [*map(str, numbers), format_ns(lane["predicted_ns"]), format_ns(lane["measured_ns"])]
            shown.append(format_bytes(lane["peak_bytes"]))
            values = (*numbers, lane["predicted_ns"], lane["measured_ns"], lane["peak_bytes"])
            assert rows["data-lane", str(lane["id"])] == list(zip(values, shown, strict=True))
            found = [words[1:] for words in table if words[0] == f"lane {lane['id']}"]
            assert found == ([shown[1:]] if len(used) > 1 else [])
        for module in graph["modules"]:
            keys = ("serial_ns", "predicted_ns", "measured_ns")
            assert rows["data-module", module["name"]] == [
                (module["num_segments"], str(module["num_segments"])),
                *((module[key], format_ns(module[key])) for key in keys),
            ]
        for candidate in graph["candidates"]:
            values = (candidate["makespan_ns"], candidate["undisturbed_ns"])
            assert rows["data-candidate", candidate["name"]] == [(value, format_ns(value)) for value in values]
        for name, line in lines.items():
            percents = [(line[key], f"{line[key]:.0%}") for key in ("overlap", "busy")]
            assert rows["data-line", name] == [(line["duration_ns"], format_ns(line["duration_ns"])), *percents]
        mine = [event for event in events if event["args"]["graph"] == graph["name"]]
        by_id = {segment["id"]: segment for segment in graph["segments"]}
        bars = [bar for name in ("serial", "predicted", "measured") for bar in lines[name]["bars"]]
        assert len(mine) == len(bars)
        for event, bar in zip(mine, bars, strict=True):
            facts, segment = event["args"], by_id[bar["segment"]]
            assert (facts["segment"], facts["start_ns"], facts["end_ns"]) == (
                bar["segment"], bar["start_ns"], bar["end_ns"]
            )  # fmt: skip
            assert event["dur"] * 1000 == pytest.approx(bar["end_ns"] - bar["start_ns"])
            for key in ("predicted_ns", "measured_ns", "units", "asked_units", "bottleneck", "module"):
                assert facts[key] == segment[key]
    standings = json.loads(report.to_json())["report"]["verdicts"][0][1]["standings"]
    assert len(standings) == 2
    for standing in standings:
        shown = [format_ns(round(standing["step_ns"])), f"{standing['ratio']:.3f}", str(standing["num_rounds"])]
        values = (standing["step_ns"], standing["ratio"], standing["num_rounds"])
        assert page.rows[-1]["data-variant", standing["name"]] == list(zip(values, shown, strict=True))
        assert [standing["name"], *shown] in [re.split(r"\s{2,}", line) for line in verdict.splitlines()]
