"""Every check accepts what its stage makes (the tests of the stages show that) and refuses what is broken here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.ir import BufferId, Dependency, SegmentId, check
from apollo_compile.passes.sync import eliminate_syncs
from apollo_compile.target.lanes import lane_catalogue
from tests.builders import costs, follow, graph, plan

GRAPH = graph((), (), (0, 1))
PLAN = plan(GRAPH, "AB*")


def test_a_program_that_may_issue_collectives_in_another_order_is_refused() -> None:
    """A plan's times are predictions; only waits and lanes keep an order."""
    made = graph((), (), (0, 1), collectives=(0, 1))
    side_by_side = plan(made, "AB*", costs=costs(made, lane_catalogue(2), [10, 10]))
    with pytest.raises(InvariantError, match="may issue its collectives before those of segment 0"):
        follow(made, side_by_side)


def test_missing_and_superfluous_waits_are_refused() -> None:
    """Both directions, and dependencies that are listed nowhere."""
    syncs, *_ = follow(GRAPH, PLAN)
    first, second = syncs.waits
    chained = graph((), (), (0, 1), (0,))
    planned = plan(chained, "ABAA")
    implied = eliminate_syncs(chained, planned)
    extra, own = (Dependency(producer=SegmentId(0), consumer=SegmentId(consumer)) for consumer in (1, 2))
    for broken, of, message in (
        (replace(syncs, waits=(first,), dropped=(second,)), (GRAPH, PLAN), "nothing orders it after segment"),
        (replace(syncs, waits=(*syncs.waits, first)), (GRAPH, PLAN), "implied"),
        (replace(syncs, dropped=(extra,)), (GRAPH, PLAN), "cross-lane dependencies, each once"),
        (replace(implied, waits=(*implied.waits, own)), (chained, planned), "of its own lane"),
    ):
        with pytest.raises(InvariantError, match=message):
            check.check_syncs(broken, *of)


def test_broken_memory_plans_are_refused() -> None:
    """Released too early, twice, or not at all; an output released; peaks that cannot be."""
    syncs, memory, _ = follow(GRAPH, PLAN)
    early = tuple(replace(hold, segment=SegmentId(0)) for hold in memory.holds)
    for broken, message in (
        (replace(memory, holds=early), "without being ordered after its user"),
        (replace(memory, holds=memory.holds[1:]), r"wrong: \[\d\]"),
        (replace(memory, at_end=(memory.holds[0].buffer,)), r"wrong: \[\d\]"),
        (replace(memory, at_end=(BufferId(3),)), r"wrong: \[3\]"),
        (replace(memory, peak_bytes=10**9), "a peak per lane"),
    ):
        with pytest.raises(InvariantError, match=message):
            check.check_memory(broken, GRAPH, PLAN, syncs)
