"""Pictures of pipelines: a page of bounded size, and a trace with everything in it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.picture import device_rows, make_blocks, render_html, render_trace
from apollo_compile.distributed.pipeline.schedules import interleaved, one_forward_one_backward
from apollo_compile.distributed.pipeline.values import Encoder, Filling, PipelineSteps, StageTimes
from apollo_compile.units import NS_PER_MS
from tests.reports.test_page import Page
from tests.reports.test_render_trace import validate


def make_steps(
    num_microbatches: int, stages_per_rank: int = 1, *, columns: int = 1, name: str = "vision"
) -> PipelineSteps:
    """Return the steps of a pipeline of four ranks with one encoder."""
    if stages_per_rank == 1:
        schedule = one_forward_one_backward(4, num_microbatches)
    else:
        schedule = interleaved(4, stages_per_rank, num_microbatches)
    times = StageTimes(
        forward_ns=(40 * NS_PER_MS,) * schedule.num_stages,
        backward_ns=(80 * NS_PER_MS,) * schedule.num_stages,
        lead_ns=30 * NS_PER_MS,
    )
    encoder = Encoder(
        name=name,
        forward_ns=((2 * NS_PER_MS,) * 20,),
        backward_ns=((2 * NS_PER_MS,) * 40,),
        replicas=tuple((device,) for device in range(4 * columns)),
    )
    plain, coarse, fine = (
        fill(schedule, times, encoders, filling=filling)
        for encoders, filling in (((), Filling.FINE), ((encoder,), Filling.COARSE), ((encoder,), Filling.FINE))
    )
    return PipelineSteps(title="four ranks <script>", plain=plain, coarse=coarse, fine=fine)


@pytest.fixture(scope="module")
def steps() -> PipelineSteps:
    """A small pipeline."""
    return make_steps(8)


def test_a_page_needs_nothing_else_and_names_every_part(steps: PipelineSteps) -> None:
    """No address in it; what comes from outside is text; what scrolls or is drawn has a name."""
    text = render_html(steps)
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "four ranks &lt;script&gt;" in text and "four ranks <script>" not in text
    for tag, attributes in page.tags:
        if attributes.get("role") in ("list", "listitem", "region", "group") or attributes.get("tabindex") == "0":
            assert attributes.get("aria-label"), (tag, attributes)
    bars = [attributes for _, attributes in page.tags if attributes.get("class", "") and "bar k" in attributes["class"]]
    assert len(bars) == sum(len(plan.bars) for plan in steps.by_name.values())
    assert "forwards and backwards" not in text, "nothing is merged here"


def test_a_step_of_many_operations_is_a_page_of_bounded_size() -> None:
    """Short bars are drawn as one; the table still counts every nanosecond."""
    large = make_steps(64, 8)
    assert len(large.fine.bars) > 4000
    text = render_html(large)
    assert len(text) < 1_000_000
    assert "Short bars are drawn as one" in text and "forwards and backwards" in text
    for plan in large.by_name.values():
        ends: dict[int, int] = defaultdict(int)
        for block in make_blocks(plan):
            assert ends[block.device] <= block.start_ns < block.end_ns <= plan.step_ns
            ends[block.device] = block.end_ns


@pytest.mark.parametrize("columns", [1, 2])
def test_the_table_of_devices_adds_up(columns: int) -> None:
    """Pipeline, encoder and bubbles are the step on every device; encoder work is that of the plan."""
    for plan in make_steps(8, columns=columns).by_name.values():
        rows = device_rows(plan)
        assert len(rows) == plan.num_devices
        assert sum(row.forward_ns + row.backward_ns for row in rows) == plan.work_ns
        for row in rows:
            assert row.pipeline_ns + row.forward_ns + row.backward_ns + row.bubble_ns == plan.step_ns
            assert ("column" in row.label) == (plan.num_devices > 4)


@pytest.mark.parametrize(("microbatches", "stages"), [(8, 1), (8, 2)])
def test_a_trace_has_every_operation_and_every_bubble_on_the_track_of_its_rank(microbatches: int, stages: int) -> None:
    """Before and after are processes; encoder work in a gap is inside its operation."""
    steps = make_steps(microbatches, stages)
    trace = json.loads(json.dumps(render_trace(steps)))
    events = trace["traceEvents"]
    validate(trace)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["without encoders", "coarse", "fine"]
    for name, plan in steps.by_name.items():
        own = [event for event in events if event["pid"] == processes[name]]
        assert [e["args"]["name"] for e in own if e["name"] == "thread_name"] == [f"rank {rank}" for rank in range(4)]
        spans = defaultdict(float)
        for event in own:
            if event["ph"] == "X":
                spans[event["cat"]] += event["dur"] * 1000
        assert sum(e["ph"] == "X" and e["cat"] != "bubble" for e in own) == len(plan.bars)
        assert spans["encoder forward"] + spans["encoder backward"] == pytest.approx(plan.work_ns)
        assert spans["bubble"] == pytest.approx(sum(row.bubble_ns for row in device_rows(plan)))
        counts = [event["args"]["idle"] for event in own if event["ph"] == "C"]
        assert counts[-1] == 0 and 0 < max(counts) <= 4


def test_a_page_works_in_a_browser(browser: Any, steps: PipelineSteps) -> None:
    """Bars tell what they are, one step can be shown alone, zoom changes the width, tables sort; nothing fails."""
    page = browser.new_page()
    page.set_default_timeout(180_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(render_html(steps))
    page.locator(".line[data-line=fine] .bar").nth(3).hover(force=True)
    assert "rank 0" in page.locator("#tip").inner_text()
    page.keyboard.press("Tab")
    page.locator("button[data-show=coarse]").click()
    assert [line.is_visible() for line in page.locator(".line").all()] == [False, True, False]
    page.locator("button[data-zoom='2']").click()
    assert page.locator("output").inner_text() == "2x"
    page.locator(".line[data-line=coarse] .scroll").focus()
    page.keyboard.press("ArrowRight")
    assert "rank 0" in page.locator("#tip").inner_text()
    page.locator("table").first.locator("button").nth(4).click()
    assert errors == []
    page.close()
