from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from apollo_compile import ir
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import Timeline
from apollo_compile.store.profiles import default_profile
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.units import format_bytes
from tests.builders import costs, graph, plan
from tests.reports.reports import VERDICT, compilation_of, report_of

NOTHING = ir.Trace(spans=(), duration_ns=0)
READS = ((), (0,), (0,), (1, 2))
NAMES = ("embed", "image.layers.0", "text.layers.0", "head")


def compilation(letters: str = "*AB*", *, handover_ns: int = 0) -> Compilation:
    """Return a diamond of four segments on a device with two units, of five nodes; the layers share a body."""
    made = graph(*READS, names=NAMES, bodies=(0, 1, 1, 2), sizes=(100, 1024, 2048, 4096, 10))
    lanes = lane_catalogue(2)
    table = costs(made, lanes, [90, 50], [400, 300], [200, 150], [100, 60], handover_ns=handover_ns)
    modes = list(table.modes)
    for number, source in ((1, ir.CostSource.MEASURED), (2, ir.CostSource.SCALED)):
        modes[number] = (replace(modes[number][0], source=source), modes[number][1])
    table = replace(table, modes=tuple(modes))
    planned = replace(plan(made, letters, lanes=lanes, costs=table), lower_bound_ns=123)
    kind = ir.NodeKind.COMPUTE
    nodes = (ir.Node(id=ir.NodeId(n), name=f"n{n}", kind=kind, target="op", inputs=(), num_bytes=4) for n in range(5))
    found = compilation_of(made, default_profile(2), table, planned)
    return replace(found, capture=replace(found.capture, nodes=tuple(nodes)))


def trace(*spans: tuple[int, int, int, int], duration_ns: int) -> ir.Trace:
    """Return a trace of (segment, lane, start, end)."""
    made = (
        ir.Span(segment=ir.SegmentId(s), lane=ir.LaneId(lane), start_ns=start, end_ns=end, core=-1)
        for s, lane, start, end in spans
    )
    return ir.Trace(spans=tuple(made), duration_ns=duration_ns)


RUN = trace((0, 0, 10, 60), (1, 1, 70, 470), (2, 2, 80, 380), (3, 0, 500, 580), duration_ns=1000)
"""The layers overlap from 80 to 380; lane 0 has both units for 130 ns, lane 1 one for 400, lane 2 one for 300."""


def test_a_plan_without_a_run_has_predictions_only() -> None:
    """In planned start order."""
    made = compilation()
    summary = summarize(made, NOTHING)
    assert (summary.name, summary.role, summary.origin) == ("test", ir.Role.INFERENCE, ir.Origin.GREEDY)
    assert (summary.num_bodies, summary.num_lanes) == (3, 3)
    assert [(s.name, s.lane, s.units, s.predicted_ns, s.source) for s in summary.segments] == [
        ("embed", 0, 2, 50, "formula"),
        ("image.layers.0", 1, 1, 400, "measured"),
        ("text.layers.0", 2, 1, 200, "scaled"),
        ("head", 0, 2, 60, "formula"),
    ]
    assert [segment.module for segment in summary.segments] == list(NAMES)
    assert {segment.measured_ns for segment in summary.segments} == {None}
    assert (summary.predicted_ns, summary.serial_ns, summary.bound_ns) == (510, 560, 123)
    assert summary.measured is None
    assert [line.name for line in summary.timelines] == ["serial", "predicted"]
    assert summary.num_waits == len(made.syncs.waits) > 0
    assert summary.num_waits_dropped == len(made.syncs.dropped)
    assert summary.peak_bytes == made.memory.peak_bytes > 0


def test_a_run_adds_measured_numbers() -> None:
    """Figures done by hand; predictions stay, and what was cut short has no numbers for the rest."""
    summary = summarize(compilation(), RUN)
    assert summary.measured is not None and summary.measured.duration_ns == 1000
    assert [segment.measured_ns for segment in summary.segments] == [50, 400, 300, 80]
    assert summary.measured.overlap == pytest.approx(0.3)
    assert summary.measured.busy == pytest.approx((2 * 130 + 400 + 300) / 2000)
    assert summary.predicted_ns == 510
    short = summarize(compilation(), trace((0, 0, 0, 100), duration_ns=200))
    assert [segment.measured_ns for segment in short.segments] == [100, None, None, None]


@pytest.mark.parametrize("seed", range(10))
def test_overlap_is_what_counting_instants_gives(seed: int) -> None:
    """On random spans."""
    rng = random.Random(seed)
    starts = [rng.randrange(90) for _ in range(4)]
    spans = [(segment, segment % 3, start, rng.randrange(start, 100)) for segment, start in enumerate(starts)]
    open_at = [sum(start <= instant < end for _, _, start, end in spans) for instant in range(100)]
    summary = summarize(compilation(), trace(*spans, duration_ns=100))
    assert summary.latest.overlap == pytest.approx(sum(count >= 2 for count in open_at) / 100)


# ----------------------------------------------------------------------------------------------------------------- text


def test_the_text_has_every_number() -> None:
    """Look at the graph, the run and the segments; `*` stands behind measured predictions, `~` behind scaled ones."""
    summary = summarize(compilation(), RUN)
    lines = str(report_of(summary)).splitlines()
    assert lines[:6] == [
        "test: 4 segments (3 bodies) on 3 lanes, greedy plan",
        "  predicted 510 ns; on one lane 560 ns (1.10x); no plan is under 123 ns (gap 314.6%)",
        "  no search",
        "  for default x2 (cpu, 2 units), profile default",
        "  measured  1.0 us; two or more lanes busy 30% of the time; units busy 48%",
        f"  {summary.num_waits} waits between lanes ({summary.num_waits_dropped} more implied); "
        "planned peak between segments 7.0 KiB",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(NAMES)}
    assert {name: " ".join(row) for name, row in rows.items()} == {
        "embed": "0 2 of 2 50 ns 50 ns 10 ns compute",
        "image.layers.0": "1 1 of 2 400 ns * 400 ns 10 ns compute",
        "text.layers.0": "2 1 of 2 200 ns ~ 300 ns 20 ns compute",
        "head": "0 2 of 2 60 ns 80 ns 30 ns compute",
    }


def test_lanes_show_their_memory_against_their_quota() -> None:
    """Planned, taken and allowed, on lanes that have memory of their own; cores share theirs."""
    made = compilation()
    memory = {"lane_bytes": {ir.LaneId(1): 3072, ir.LaneId(2): 5120}, "lane_memory_quota": 8192}
    on_cores = summarize(made, RUN)
    assert [lane.peak_bytes for lane in on_cores.lanes] == list(made.memory.peak_bytes_by_lane)
    assert {(lane.taken_bytes, lane.quota_bytes) for lane in on_cores.lanes} == {(None, None)}
    on_sms = summarize(replace(made, profile=replace(made.profile, kind="cuda")), RUN, **memory)
    assert [(lane.taken_bytes, lane.quota_bytes) for lane in on_sms.lanes] == [(None, 8192), (3072, 8192), (5120, 8192)]
    rows = {graph: str(report_of(graph)).splitlines() for graph in (on_cores, on_sms)}
    titles = "units    segments    predicted busy    measured    planned peak"
    assert [" ".join(row.split()) for row in rows[on_cores] if "planned peak" in row][1:] == [" ".join(titles.split())]
    lane_1 = ["lane", "1", "1", "1", "400", "ns", "400", "ns", *format_bytes(made.memory.peak_bytes_by_lane[1]).split()]
    assert lane_1 in [row.split() for row in rows[on_cores]]
    assert [*lane_1, "3.0", "KiB", "8.0", "KiB"] in [row.split() for row in rows[on_sms]]
    report = report_of(on_sms)
    assert '<td class="n" data-v="5120">5.0 KiB</td><td class="n" data-v="8192">8.0 KiB</td></tr>' in report.to_html()
    events = json.loads(report.to_trace())["traceEvents"]
    found = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert (found["lane 1 took"], found["lane 1 may take"]) == ({"bytes": 3072}, {"bytes": 8192})
    assert "lane 0 may take" in found and "lane 0 took" not in found
    on_cores_trace = report_of(on_cores).to_trace()
    assert "took" not in on_cores_trace and "may take" not in on_cores_trace


def test_what_lanes_hold_adds_up_to_what_the_graph_holds() -> None:
    """At every change, in the plan and in a run; the plan of one lane after the other has no memory plan."""
    serial, predicted, measured = summarize(compilation(), RUN).timelines
    assert serial.memory_by_lane == serial.memory == ()
    assert measured.memory_by_lane[1] == ((70, 2048), (580, 0))
    assert measured.memory_by_lane[2] == ((80, 4096), (580, 0))
    for line in (predicted, measured):
        for time_ns, held in line.memory:
            assert held == sum(
                max((step for step in steps if step[0] <= time_ns), default=(0, 0))[1] for steps in line.memory_by_lane
            )


def test_graphs_that_inductor_runs_are_listed_with_the_reason() -> None:
    """After those that run in segments."""
    summary = summarize(compilation(), NOTHING)
    text = str(report_of(summary, summary, fallbacks=(("1/0 forward", "x is on device cuda:0"),)))
    assert text.split("\n\n")[-1] == "1/0 forward: falls back to Inductor\n  because x is on device cuda:0"
    assert text.count("test: 4 segments") == 2


def test_a_report_of_nothing_says_what_to_do() -> None:
    """Before the first call, or for a model that was never compiled; on the page as well."""
    nothing = report_of()
    assert str(nothing).startswith("nothing compiled for this model has run yet: call the compiled model first")
    assert "Without a model, report() covers everything that was compiled" in str(nothing)
    assert "With the option disable or APOLLO_DISABLE=1 nothing is reported" in str(nothing)
    assert "Where Dynamo runs all of a model in eager, TORCH_LOGS=graph_breaks says why" in str(nothing)
    assert "call the compiled model first" in nothing.to_html()


def test_a_graph_without_segments_has_a_text() -> None:
    """It returns its inputs."""
    nothing = {"num_bodies": 0, "num_lanes": 0, "segments": (), "modules": (), "branches": (), "pairs": (), "lanes": ()}
    line = Timeline(name="serial", duration_ns=0, overlap=0.0, busy=0.0, bars=(), units=(), memory=())
    times = {"predicted_ns": 0, "serial_ns": 0, "bound_ns": 0, "gap": 0.0, "critical_path_ns": 0, "peak_bytes": 0}
    origin = {"name": "empty", "origin": ir.Origin.SERIAL, "candidates": (), "waits": (), "timelines": (line,)}
    empty = replace(summarize(compilation(), NOTHING), **nothing, **times, **origin)  # type: ignore[arg-type]
    begin = "empty: 0 segments (0 bodies) on 0 lanes, serial plan\n  predicted 0 ns"
    assert str(report_of(empty)).startswith(begin)


def test_a_report_says_where_a_plan_comes_from() -> None:
    """Candidates, solver, limits, replans."""
    made = compilation()
    tried = ir.RankedSchedule(name="serial", undisturbed_ns=560, makespan_ns=560)
    searched = replace(made.plan, candidates=(tried, tried), solver="solver 1.0", seed=7, stopped_early=True)
    summary = summarize(replace(made, plan=searched), NOTHING, num_replans=2)
    assert summary.gap == pytest.approx(510 / 123 - 1)
    text = str(report_of(summary))
    assert "best of 2 candidates; solver 1.0, seed 7; stopped by the time limit; planned again from measured" in text
    pinned = summarize(replace(made, plan=replace(made.plan, pinned=True)), NOTHING)
    assert "read from a plan file" in str(report_of(pinned))


def test_a_report_shows_the_comparison_and_what_runs_instead_of_the_plan() -> None:
    """Who was compared, by how much the others are slower, and in how many rounds."""
    text = str(report_of(summarize(compilation(), NOTHING, variant=ir.Variant.INDUCTOR), verdicts=(("0/0", VERDICT),)))
    assert "now runs Inductor instead of its plan" in text
    assert "0/0: chosen by measuring" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["Inductor", "2.00", "ms", "1.000", "5"] in rows
    assert ["segments", "in", "turn", "2.50", "ms", "1.250", "7"] in rows
    assert "measured in 36 steps of the training loop" in text
    assert "instead of its plan" not in str(report_of(summarize(compilation(), NOTHING)))
