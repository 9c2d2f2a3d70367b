from __future__ import annotations

import pytest

from tests.builders import follow, random_planned
from tests.passes.test_sync import pairs, reachable


@pytest.mark.parametrize("seed", range(60))
def test_the_hold_is_the_first_segment_ordered_after_all_users(seed: int) -> None:
    """Against the transitive closure; no earlier segment qualifies."""
    made, planned = random_planned(seed)
    syncs, memory, _ = follow(made, planned)
    before, holds = reachable(made, planned, pairs(syncs.waits)), {hold.buffer: hold.segment for hold in memory.holds}
    order = [assignment.segment for assignment in planned.in_start_order()]
    for buffer in made.buffers:
        users = {*buffer.readers, *([] if buffer.producer is None else [buffer.producer])}
        owners = [s for s in order if all(user == s or (user, s) in before for user in users)]
        if buffer.is_output:
            assert buffer.id not in holds
        else:
            assert holds.get(buffer.id) == (owners[0] if owners else None)
            assert (buffer.id in memory.at_end) == (not owners)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_largest_sum_of_living_buffers(seed: int) -> None:
    """Counted at every start of a segment, where alone it can be."""
    made, planned = random_planned(seed)
    _, memory, _ = follow(made, planned)
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
    assert memory.peak_bytes_by_lane == tuple(max(alive(time, lane.id) for time in times) for lane in planned.lanes)
