"""Golden text of our own short forms; `APOLLO_ACCEPT=1 pytest tests/ir/test_text.py` accepts a change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from apollo_compile.ir import LaneId, SegmentId, Span, Trace, text
from apollo_compile.passes.plan import make_plan
from apollo_compile.target.lanes import lane_catalogue, lanes_for_two
from tests.builders import costs, follow, graph, plan, random_costs, random_graph, random_lanes
from tests.ir.check.test_graph import capture, partition

NAMES = ("embed", "vision.layers.0", "vision.layers.1", "text.layers.0", "text.layers.1", "head")
GRAPH = graph((), (0,), (1,), (0,), (3,), (2, 4), names=NAMES, bodies=(0, 1, 1, 2, 2, 3), after={5: [1]})
LANES = lanes_for_two(lane_catalogue(4))
COSTS = costs(
    GRAPH,
    LANES,
    [4_000, 3_000, 2_500, 2_200],
    *[[90_000, 60_000, 50_000, 45_000]] * 2,
    *[[70_000, 45_000, 38_000, 34_000]] * 2,
    [9_000, 6_000, 5_000, 4_500],
    handover_ns=1_500,
)
PLAN = plan(GRAPH, "*AABB*", lanes=LANES, costs=COSTS, order=(0, 1, 3, 2, 4, 5))
SYNCS, MEMORY, PROGRAM = follow(GRAPH, PLAN)

FORMS: dict[str, Callable[[], str]] = {
    "capture": lambda: text.format_capture(capture()),
    "partition": lambda: text.format_partition(partition()),
    "costs": lambda: text.format_costs(COSTS, GRAPH),
    "plan": lambda: text.format_plan(PLAN, GRAPH),
    "syncs": lambda: text.format_syncs(SYNCS, GRAPH, PLAN),
    "memory": lambda: text.format_memory(MEMORY, GRAPH),
    "program": lambda: text.format_program(PROGRAM, GRAPH),
    "trace": lambda: text.format_trace(slower_trace(), GRAPH, PLAN),
}


def slower_trace() -> Trace:
    """Return a run in which every segment took a tenth longer than planned."""
    spans = tuple(
        Span(
            segment=SegmentId(a.segment),
            lane=LaneId(a.lane),
            start_ns=a.start_ns * 11 // 10,
            end_ns=a.end_ns * 11 // 10,
            core=a.lane if a.lane else -1,
        )
        for a in PLAN.in_start_order()
    )
    return Trace(spans=spans, duration_ns=spans[-1].end_ns + 500)


@pytest.mark.parametrize("name", FORMS)
def test_every_product_reads_as_it_did(name: str, expect: Callable[[str, str], None]) -> None:
    """Tables, timelines of lanes, and programs like code."""
    expect(name, FORMS[name]())


@pytest.mark.parametrize("seed", range(20))
def test_every_product_has_a_text(seed: int) -> None:
    """Also the empty graph, tables without rows, and durations far apart."""
    rng = random.Random(seed)
    made = random_graph(rng, seed)
    lanes = random_lanes(rng)
    table = random_costs(rng, made, lanes)
    planned = make_plan(made, table, lanes=lanes, planner="greedy", work_s=0.2)
    syncs, memory, program = follow(made, planned)
    for form in (
        text.format_costs(table, made),
        text.format_plan(planned, made),
        text.format_syncs(syncs, made, planned),
        text.format_memory(memory, made),
        text.format_program(program, made),
        text.format_trace(Trace(spans=(), duration_ns=0), made, planned),
    ):
        assert form
        assert all(line == line.rstrip() for line in form.splitlines())
