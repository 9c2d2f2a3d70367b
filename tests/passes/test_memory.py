from __future__ import annotations

import random

import pytest

from apollo_compile.ir import MemoryPlan, Plan, SegmentGraph
from apollo_compile.ir.check import check_memory
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.sync import eliminate_syncs
from tests.builders import graph, plan, random_costs, random_graph, random_lanes, random_plan
from tests.passes.test_sync import pairs, reachable


def holds(memory: MemoryPlan) -> dict[int, int]:
    """Return the hold segment of every buffer."""
    return {hold.buffer: hold.segment for hold in memory.holds}


def plan_all(made: SegmentGraph, planned: Plan) -> MemoryPlan:
    """Return the checked memory plan."""
    syncs = eliminate_syncs(made, planned)
    memory = plan_memory(made, planned, syncs)
    check_memory(memory, made, planned, syncs)
    return memory


@pytest.mark.parametrize("seed", range(60))
def test_the_hold_is_the_first_segment_ordered_after_all_users(seed: int) -> None:
    """Against the transitive closure; no earlier segment qualifies."""
    rng = random.Random(seed)
    made = random_graph(rng, rng.randrange(1, 12))
    lanes = random_lanes(rng)
    planned = random_plan(rng, made, lanes, random_costs(rng, made, lanes))
    memory = plan_all(made, planned)
    before = reachable(made, planned, pairs(eliminate_syncs(made, planned).waits))
    order = [assignment.segment for assignment in planned.in_start_order()]
    for buffer in made.buffers:
        users = {*buffer.readers, *([] if buffer.producer is None else [buffer.producer])}
        owners = [s for s in order if all(user == s or (user, s) in before for user in users)]
        if buffer.is_output:
            assert buffer.id not in holds(memory)
        else:
            assert holds(memory).get(buffer.id) == (owners[0] if owners else None)
            assert (buffer.id in memory.at_end) == (not owners)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_largest_sum_of_living_buffers(seed: int) -> None:
    """Counted at every start of a segment, where alone it can be."""
    rng = random.Random(seed)
    made = random_graph(rng, rng.randrange(1, 12))
    lanes = random_lanes(rng)
    planned = random_plan(rng, made, lanes, random_costs(rng, made, lanes))
    memory = plan_all(made, planned)
    ends = {hold.buffer: planned.assignments[hold.segment].end_ns for hold in memory.holds}

    def alive(time: int, lane: int | None) -> int:
        total = 0
        for buffer in made.buffers:
            if buffer.producer is not None:
                made_by = planned.assignments[buffer.producer]
                if made_by.start_ns <= time < ends.get(buffer.id, time + 1) and lane in (None, made_by.lane):
                    total += buffer.num_bytes
        return total

    times = [assignment.start_ns for assignment in planned.assignments]
    assert memory.peak_bytes == max(alive(time, None) for time in times)
    assert memory.peak_bytes_by_lane == tuple(max(alive(time, lane.id) for time in times) for lane in lanes)


def test_the_last_reader_takes_the_buffer() -> None:
    """A chain on one lane: each segment takes what the one before made, the first takes the graph input."""
    made = graph((), (0,), (1,))
    assert holds(plan_all(made, plan(made, "***"))) == {0: 0, 1: 1, 2: 2}


def test_readers_on_lanes_that_meet_again_hold_until_they_meet() -> None:
    """Segments 1 and 2 read buffer 1 on two lanes; segment 3 is the first that follows both."""
    made = graph((), (0,), (0,), (1, 2))
    assert holds(plan_all(made, plan(made, "AABA")))[1] == 3


def test_readers_on_lanes_that_never_meet_hold_until_the_end() -> None:
    """Nobody is ordered after both."""
    made = graph((), (0,), (0,))
    assert plan_all(made, plan(made, "AAB")).at_end == (1,)


def test_a_buffer_that_nobody_reads_goes_right_after_its_producer() -> None:
    """It is not returned either."""
    made = graph((), (), outputs=[1])
    assert holds(plan_all(made, plan(made, "**")))[1] == 0


def test_what_the_graph_returns_is_never_let_go() -> None:
    """Although segment 1 is its last reader."""
    made = graph((), (0,), outputs=[0, 1])
    memory = plan_all(made, plan(made, "**"))
    assert set(holds(memory)) == {0}
    assert memory.at_end == ()
