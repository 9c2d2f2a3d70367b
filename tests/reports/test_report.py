"""Reports as JSON, as words, as differences."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace

import pytest
from markupsafe import escape

from apollo_compile.errors import ReportFileError
from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.reports.colors import COLORS, color_of_branches
from apollo_compile.reports.report import Report, merge_reports
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import Bottleneck, Limit, Stage, State
from apollo_compile.reports.words import describe, describe_state
from benchmarks.graphs import WORKLOADS
from tests.reports.reports import VERDICT, a_break, report_of, told_of, workload_report
from tests.reports.test_summary import NOTHING, RUN, compilation, trace


def small(letters: str = "*AB*") -> Report:
    """Return a report of the diamond of four segments."""
    return report_of(summarize(compilation(letters), RUN))


# -------------------------------------------------------------------------------------------------------------- numbers


def test_bottlenecks_follow_the_shares_and_the_idle_time_before() -> None:
    """The diamond's costs have no shares, so its segments compute; a long gap makes one wait."""
    made = compilation()
    assert {segment.bottleneck for segment in summarize(made, RUN).segments} == {Bottleneck.COMPUTE}
    late = replace(RUN, spans=(*RUN.spans[:3], replace(RUN.spans[3], start_ns=900, end_ns=980)))
    (head,) = [segment for segment in summarize(made, late).segments if segment.name == "head"]
    assert (head.waited_ns, head.bottleneck) == (430, Bottleneck.WAITING)
    modes = tuple(tuple(replace(mode, memory_share=0.5, launch_share=0.1) for mode in row) for row in made.costs.modes)
    shared = summarize(replace(made, costs=replace(made.costs, modes=modes)), NOTHING)
    assert {segment.bottleneck for segment in shared.segments} == {Bottleneck.MEMORY}


def test_a_segment_asks_for_the_fewest_units_that_make_it_fast() -> None:
    """Within two percent of its best."""
    made = compilation()
    rows = list(made.costs.modes)
    rows[1] = (replace(rows[1][0], duration_ns=305), rows[1][1])
    summary = summarize(replace(made, costs=replace(made.costs, modes=tuple(rows))), NOTHING)
    assert [segment.asked_units for segment in summary.segments] == [2, 1, 2, 2]


def test_independent_branches_and_what_they_shared() -> None:
    """Figures done by hand: the two layers have nothing to do with each other, everything else is a chain."""
    summary = summarize(compilation(), RUN)
    pairs = {frozenset((pair.first, pair.second)): pair for pair in summary.pairs}
    layers = pairs[frozenset(("image", "text"))]
    assert (layers.could_overlap_ns, layers.overlap_ns) == (150, 300)
    assert {pair.could_overlap_ns for key, pair in pairs.items() if key != {"image", "text"}} == {0}
    assert len(pairs) == 4 + 6  # a branch is a pair with itself, too
    assert summary.critical_path_ns == 50 + 300 + 60
    assert summary.limit is Limit.DEPENDENCIES  # all units would be at work for (90 + 400 + 200 + 100) / 2


def test_what_runs_side_by_side_within_a_branch_is_told() -> None:
    """The two layers as one branch: half of the 300 and 150 ns can be side by side; 300 were, on slower units."""
    made = compilation()
    graph = made.partition.graph
    one_branch = tuple(
        replace(segment, module="layers") if segment.name.endswith("layers.0") else segment
        for segment in graph.segments
    )
    partition = replace(made.partition, graph=replace(graph, segments=one_branch))
    for run, told in ((RUN, "Segments within layers overlapped for 300 ns."), (NOTHING, "layers will overlap for")):
        summary = summarize(replace(made, partition=partition), run)
        (pair,) = [pair for pair in summary.pairs if pair.first == pair.second == "layers"]
        assert (pair.could_overlap_ns, pair.overlap_ns) == (225, 300 if run is RUN else 200)
        text = told_of(summary)
        assert told in text and "Almost nothing can overlap between modules" in text


@pytest.mark.parametrize("workload", WORKLOADS)
def test_numbers_of_real_plans_agree_with_each_other(workload: str) -> None:
    """Sums, peaks and timelines of the saved graphs, each computed from two sides."""
    for graph in workload_report(workload).graphs:
        serial, predicted, measured = graph.timelines
        assert serial.duration_ns == graph.serial_ns == max(bar.end_ns for bar in serial.bars)
        assert predicted.duration_ns == graph.predicted_ns == max(bar.end_ns for bar in predicted.bars)
        assert max(level for _, level in predicted.memory) == graph.peak_bytes
        assert [max((level for _, level in steps), default=0) for steps in predicted.memory_by_lane] == [
            lane.peak_bytes for lane in graph.lanes
        ]
        assert predicted.units[-1][1] == measured.units[-1][1] == 0
        assert sum(lane.predicted_ns for lane in graph.lanes) == sum(s.predicted_ns for s in graph.segments)
        assert sum(module.serial_ns for module in graph.modules) == graph.serial_ns
        assert sum(module.num_segments for module in graph.modules) == len(graph.segments)
        for line in graph.timelines:
            assert 0 <= line.overlap <= 1 and 0 < line.busy <= 1
            area = sum(level * (later - now) for (now, level), (later, _) in itertools.pairwise(line.units))
            assert line.busy == pytest.approx(area / (graph.device.units * line.duration_ns))
        assert graph.critical_path_ns <= graph.bound_ns * 1.0001 or graph.critical_path_ns <= graph.predicted_ns


# ----------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 3}', '{"format": 2, "report": {}}', '{"format": 3, "report": {"graphs": 3}}']
)
def test_what_is_no_report_is_refused(text: str) -> None:
    """With what was expected; also one with memory of more lanes than it has: files have other writers than us."""
    with pytest.raises(ReportFileError, match=r"written by Report\.to_json"):
        Report.from_json(text)
    content = json.loads(small().to_json())
    content["report"]["graphs"][0]["timelines"][1]["memory_by_lane"].append([])
    with pytest.raises(ReportFileError, match="timelines must show segments and memory on lanes"):
        Report.from_json(json.dumps(content))


# ---------------------------------------------------------------------------------------------------------------- words


SETTLED = State(graph="0/0", stage=Stage.SETTLED, detail="plan, 1.21x as fast as Inductor")
MEASURING = State(graph="1/0", stage=Stage.MEASURING, detail="round 3 of at least 5, about 40 steps left")
FALLEN_BACK = State(graph="2/0", stage=Stage.FALLS_BACK, detail="x is on device cuda:0 <&>")


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ((replace(SETTLED, detail=""),), "settled"),
        ((SETTLED,), "settled: plan, 1.21x as fast as Inductor"),
        ((SETTLED, replace(SETTLED, graph="1/0")), "settled: plan, 1.21x as fast as Inductor"),
        ((MEASURING,), "measuring: round 3 of at least 5, about 40 steps left"),
        ((FALLEN_BACK,), "falls back: x is on device cuda:0 <&>"),
        (
            (SETTLED, MEASURING, FALLEN_BACK, replace(SETTLED, graph="3/0", detail="")),
            "measuring: 1/0 (round 3 of at least 5, about 40 steps left); "
            "falls back: 2/0 (x is on device cuda:0 <&>); settled: 0/0 (plan, 1.21x as fast as Inductor), 3/0",
        ),
    ],
)
def test_the_first_line_says_how_far_it_is(states: tuple[State, ...], told: str) -> None:
    """In the text, above all graphs of the page, and in JSON."""
    report = replace(small(), states=states)
    assert str(report).splitlines()[:3] == [told, "", "test: 4 segments (3 bodies) on 3 lanes, greedy plan"]
    page = report.to_html()
    assert page.index(f'<p class="state">{escape(told)}</p>') < page.index("<section")
    found = json.loads(report.to_json())["report"]["states"]
    assert [(each["graph"], each["stage"]) for each in found] == [(each.graph, each.stage) for each in states]
    assert str(small()).startswith("test: ") and 'class="state"' not in small().to_html()


@pytest.mark.parametrize(
    ("stage", "num_steps", "left_ns", "told"),
    [
        (Stage.MEASURING, 60, 20_000_000_000, "measuring, about 60 steps (20 s) left: x"),
        (Stage.MEASURING, 1, 0, "measuring, about 1 step left: x"),
        (Stage.MEASURING, 900, 300_000_000_000, "measuring, about 900 steps (5 min) left: x"),
        (Stage.SETTLED, 128, 0, "settled after 128 measured steps: x"),
        (Stage.SETTLED, 0, 0, "settled: x"),
        (Stage.FALLS_BACK, 3, 0, "falls back: x"),
    ],
)
def test_a_state_says_how_many_steps_it_takes(stage: Stage, num_steps: int, left_ns: int, told: str) -> None:
    """And about how long, where that is known."""
    state = State(graph="0/0", stage=stage, detail="x", num_steps=num_steps, left_ns=left_ns)
    assert str(state) == told == describe_state([state, state])
    other = replace(state, graph="1/0", num_steps=0, left_ns=0, detail="y")
    assert describe_state([state, other]) == told.replace(": x", ": 0/0 (x), 1/0 (y)")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["plan", "Inductor", "loop in eager"], "1.25x as fast as torch.compile, 1.50x as eager"),
        (["plan", "loop in eager", "Inductor, traced step"], "1.50x as fast as torch.compile, 1.25x as eager"),
        (["plan", "segments in turn"], "1.25x as fast as segments in turn"),
        (["Inductor", "plan", "segments in turn"], "1.25x as fast as plan"),
        (["plan"], ""),
    ],
)
def test_a_verdict_compares_with_what_runs_without_apollo(names: list[str], told: str) -> None:
    """With the next variant where that wins, or did not compete; times of losers follow from the ratios."""
    standings = tuple(
        Standing(name=name, step_ns=1e6 * (1 + 9 * place), ratio=1 + place / 4, num_rounds=7)
        for place, name in enumerate(names)
    )
    verdict = Verdict(standings=standings, num_steps=36)
    assert verdict.summary == told
    assert [verdict.time_of(each) for each in standings] == [1e6 * each.ratio for each in standings]


def test_the_first_line_names_few_of_many_graphs() -> None:
    """A model with many graph breaks has many."""
    states = [replace(SETTLED, graph=f"{number}/0", detail="plan" if number else "") for number in range(32)]
    assert describe_state(states) == "settled: 0/0, 1/0 (plan), 2/0 (plan), 3/0 (plan) and 28 more"
    assert describe_state(states[1:]) == "settled: plan"
    assert describe_state([]) == ""


def test_a_first_call_is_no_measurement() -> None:
    """Text, page and JSON say that there will be one; a dry run has none to come."""
    cold, planned = (report_of(summarize(compilation(), NOTHING, is_cold=each)) for each in (True, False))
    assert "  not measured yet: the first call of a plan is cold and does not count" in str(cold).splitlines()
    assert "<dt>Measured</dt><dd>not yet</dd>" in cold.to_html()
    assert json.loads(cold.to_json())["report"]["graphs"][0]["is_cold"] is True
    assert "not measured yet" not in str(planned) and "<dt>Measured" not in planned.to_html()


def test_independent_branches_that_run_in_turn_get_a_reason() -> None:
    """On one lane, because halves of the device take longer; because Inductor runs the graph; for lack of units."""
    made = summarize(compilation("****"), NOTHING)
    assert "on 1 of the 2 units they take 1.33x as long as on all" in told_of(made)
    assert "Inductor runs the graph" in told_of(replace(made, variant=Variant.INDUCTOR))
    assert "there is one unit" in told_of(replace(made, device=replace(made.device, units=1)))


def test_a_disturbed_run_says_nothing_of_the_plan() -> None:
    """The two layers are planned side by side for 200 ns; in a run in which they were not, the plan is not to blame."""
    apart = trace((0, 0, 10, 60), (1, 1, 70, 470), (2, 2, 480, 780), (3, 0, 800, 880), duration_ns=1000)
    text = told_of(summarize(compilation(), apart))
    assert "image and text are planned to overlap for 200 ns, but overlapped for 0 ns in the last run, which" in text
    assert "the plan gains more elsewhere" not in text
    assert "run one after the other" in told_of(summarize(compilation("*AA*"), apart))


def test_operators_without_a_formula_are_named() -> None:
    """By those whose formulas are asked for; a model that has formulas for all is told nothing of them."""
    made = compilation("****")
    assert "no formula but bytes" not in told_of(summarize(made, NOTHING))
    rough = replace(made, capture=replace(made.capture, without_formula=("aten._cdist_forward.default",)))
    assert "no formula but bytes: aten._cdist_forward.default." in told_of(summarize(rough, NOTHING))


def test_a_run_that_took_longer_than_predicted_is_told_with_what_did() -> None:
    """The diamond took 1000 ns instead of 510, in 470 of them nothing ran; text.layers took 300 instead of 200."""
    (graph,) = small().graphs
    assert (graph.predicted.idle_ns, graph.latest.idle_ns) == (0, 470)
    slower = "took {} the predicted time, the largest part of it {} more)"
    assert slower.format("1.96x", "while no lane was busy (470 ns") in told_of(graph)
    short = replace(graph, timelines=(*graph.timelines[:-1], replace(graph.latest, duration_ns=580)))
    assert slower.format("1.14x", "in text.layers (100 ns") in told_of(short)
    assert "The last run" not in told_of(replace(graph, predicted_ns=1000))


def test_why_answers_in_few_sentences() -> None:
    """Where, why then, and what runs beside it; of a module, about the graph in which it takes most."""
    assert small().why("image.layers.0") == (
        "image.layers.0 runs in test on lane 1, with 1 unit of 2 requested, planned from 50 ns to 450 ns. "
        "Alone it takes 400 ns on 1, 300 ns on 2. "
        "It starts at 50 ns, when embed has ended, on which it depends. "
        "Concurrent with it: text.layers.0, for 200 ns in total."
    )
    assert small().why("embed").endswith(
        "at 0 ns, since it depends on no other segment. Nothing runs concurrently, since its lane has all 2 units."
    )  # fmt: skip
    assert "It starts at 450 ns, when image.layers.0 has released the units of its lane." in small("*BB*").why("text")
    where, then, beside = workload_report("clip").why("text_model").split(". ")
    assert re.fullmatch(
        r"text_model is \d+ segments in (clip_\w+), (clip_\w+) on lanes? [\d, ]+, planned for .* of work", where
    )
    assert then.startswith("In clip_backward it starts at ")
    assert beside.startswith("Concurrent with it: vision_model.") and " more, for " in beside
    whole = report_of(replace(small().graphs[0], variant=Variant.INDUCTOR))
    assert whole.why("embed").endswith("The graph now runs Inductor instead of its plan; see the verdict.")


@pytest.mark.parametrize(
    ("name", "module", "others", "title"),
    [
        ("vision.embed", "vision.embed", (), "vision.embed"),
        ("vision.embed#2", "vision.embed", ("vision.norm", "vision"), "vision.embed#2 + norm"),
        ("text.norm", "text.norm", ("text.layers.5.fc", "head"), "text.norm + layers.5.fc + head"),
        ("text.layers.5", "text.layers.5", ("text.layers.4.fc", "a", "b"), "text.layers.5 + layers.4.fc + a + 1 more"),
        ("~mm_4", "", ("head",), "mm_4 (no module) + head"),
    ],
)
def test_a_segment_is_named_after_all_modules_that_it_holds(
    name: str, module: str, others: tuple[str, ...], title: str
) -> None:
    """In the text and on the page, where the full names are a tooltip; `why` answers for each of them."""
    (graph,) = small().graphs
    first = replace(graph.segments[0], name=name, module=module, others=others)
    report = report_of(replace(graph, segments=(first, *graph.segments[1:])))
    assert first.title == title
    assert f"\n{title}  " in str(report) and f'aria-label="{title}, lane' in report.to_html()
    for asked in {name, title, *others} - {"vision", "head"}:
        assert report.why(asked).startswith(f"{name} runs in test")


def test_why_of_an_unknown_name_lists_similar_ones_and_a_break_stands_below_the_graphs() -> None:
    """With why graphs are not there at all, the line of a break, and what removes it."""
    report = replace(small(), fallbacks=(("1/0 forward", "dynamic shapes"),), breaks=(a_break(),))
    with pytest.raises(LookupError, match=r"similar: image\.layers\.0(.|\n)*dynamic shapes"):
        report.why("image.layer.0")
    with pytest.raises(LookupError) as raised:
        merge_reports([report, report]).why("image.layer.0")
    assert str(raised.value).count("image.layers.0") == 1
    text = str(report)
    assert "graph break behind 0/0: Unsupported Tensor.item() call\n  model.py:12 in forward: if x" in text
    assert "\n  try: torch._dynamo.config.capture_scalar_outputs = True" in text
    assert "Try to remove the graph break below" in text


# ----------------------------------------------------------------------------------------------------------- difference


def test_a_difference_names_moves_times_and_graphs_that_one_side_lacks() -> None:
    """Before and after; graphs of one name are compared in their order, the first with the first."""
    one, other = small("*AB*"), small("****")
    difference = other.diff(one)
    (graph,) = difference.graphs
    assert not difference.is_same_plan
    assert graph.moved == ("image.layers.0", "text.layers.0")
    assert (graph.before.predicted_ns, graph.after.predicted_ns) == (560, 510)
    assert "image.layers.0: lane 0 (2 units) -> lane 1 (1 unit), 300 ns -> 400 ns" in str(difference)
    for report in (one, workload_report("flava")):
        same = report.diff(report)
        assert same.is_same_plan and all("same plan" in block for block in str(same).split("\n\n"))
    nothing = report_of()
    assert one.diff(nothing).only_before == ("test",)
    assert str(nothing.diff(one)) == "test: only in the second"
    assert str(nothing.diff(nothing)) == "no graph in either"
    (first,), (second,) = one.graphs, other.graphs
    difference = replace(one, graphs=(first, second)).diff(replace(one, graphs=(first, first, second)))
    assert [graph.is_same_plan for graph in difference.graphs] == [True, False]
    assert difference.only_after == ("test",) and difference.only_before == ()


def test_reports_of_several_dynamo_graphs_become_one_with_unique_names() -> None:
    """Whatever tells of a graph gets the same number."""
    each = replace(
        small(),
        fallbacks=(("0/0 backward", "x is on device cuda:0"),),
        verdicts=(("0/0", VERDICT),),
        breaks=(a_break(),),
        states=(State(graph="0/0", stage=Stage.SETTLED),),
    )
    merged = merge_reports([each, report_of(fallbacks=(("1/0 forward", "x"),)), each, each])
    endings = ["", "#2", "#3"]
    assert [graph.name for graph in merged.graphs] == [f"test{ending}" for ending in endings]
    assert [name for name, _ in merged.fallbacks] == [
        "0/0 backward", "1/0 forward", "0/0 backward#2", "0/0 backward#3"
    ]  # fmt: skip
    names = [name for name, _ in merged.verdicts]
    assert names == [f"0/0{ending}" for ending in endings]
    assert [found.graph for found in merged.breaks] == [state.graph for state in merged.states] == names
    assert merge_reports([each]) == each


def test_a_branch_has_one_colour_in_all_graphs() -> None:
    """In the backward of CLIP its two towers stand the other way round."""
    report = workload_report("clip")
    first, second = (graph.branches for graph in report.graphs)
    assert first[:2] != second[:2] and set(first[:2]) == set(second[:2])
    found = defaultdict(set)
    for color, branch in re.findall(r'<li class="c(\d)">([^<]+)</li>', report.to_html()):
        found[branch].add(COLORS[int(color)])
    assert {branch: len(colors) for branch, colors in found.items()} == dict.fromkeys((*first, *second), 1)
    assert len(set.union(*found.values())) == len(found)


def test_branches_of_one_graph_have_different_colours() -> None:
    """Also in a report of more branches than there are colours; a branch keeps its own where that is free."""
    graphs = [tuple(f"{letter}{number}" for number in range(5)) for letter in "abc"]
    graphs.append(("b0", "c4", "a0"))
    summary = small().graphs[0]
    found = color_of_branches(report_of(*(replace(summary, branches=names) for names in graphs)))
    assert [set(colors) for colors in found] == [set(names) for names in graphs]
    assert [len(set(colors.values())) for colors in found] == [5, 5, 5, 3]
    assert found[3]["b0"] == found[1]["b0"]
    (many,) = color_of_branches(report_of(replace(summary, branches=tuple(map(str, range(20))))))
    assert len(many) == 20 and set(many.values()) == set(range(len(COLORS)))


@pytest.mark.parametrize(
    ("workload", "overlapped", "limited", "to_try", "gain"),
    [
        ("clip", True, "No plan takes less than", "", 1.05),
        ("llava", False, "can be more than 1.0", "Lanes cannot help here. Try", 1.0),
        ("vit_control", False, "can be more than 1.0", "Lanes cannot help here. Try", 1.0),
    ],
)
def test_a_user_with_a_slow_model_finds_the_four_answers(
    workload: str, overlapped: bool, limited: str, to_try: str, gain: float
) -> None:
    """What overlapped, what did not and why, what limits it, what to try: in the text and on the page alike."""
    report = workload_report(workload)
    text, page = str(report), report.to_html()
    sentences = describe(report.graphs[0], report)
    assert any("overlapped for" in sentence for sentence in sentences) is overlapped
    assert any("depend on each other" in sentence for sentence in sentences) is not overlapped
    assert any(limited in sentence for sentence in sentences)
    assert any(sentence.startswith(to_try) for sentence in sentences)
    assert all(f"  - {sentence}\n" in f"{text}\n" for sentence in sentences)
    assert all(f"<li>{escape(sentence)}</li>" in page for sentence in sentences)
    assert (report.graphs[0].gain >= gain) and (report.graphs[0].gain == 1.0) is not overlapped
