"""The benchmark that says where the time of the units goes."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from apollo_compile.ir import Lane, LaneId, SegmentId, Span, Trace
from benchmarks.lost_time import account
from tests.builders import graph

LANES = tuple(Lane(id=LaneId(index), units=units) for index, units in enumerate([(0, 1), (0,), (1,)]))


def _trace(*spans: tuple[int, int, int], duration: int) -> Trace:
    return Trace(
        spans=tuple(
            Span(segment=SegmentId(segment), lane=LaneId(lane), start_ns=start, end_ns=end, core=0)
            for segment, (lane, start, end) in enumerate(spans)
        ),
        duration_ns=duration,
    )


def test_every_nanosecond_of_every_unit_is_in_one_part() -> None:
    """Worked out by hand: 0 on both units, then 1 beside 2, then 3 on unit 0, which needs both."""
    made = graph((), (0,), (0,), (1, 2))
    trace = _trace((0, 5, 25), (1, 30, 90), (2, 27, 67), (1, 95, 105), duration=110)
    alone = {1: [30, 50, 40, 10], 2: [18, 30, 25, 8]}
    lost = account(made, LANES, trace, alone)
    assert lost.work == 30 + 50 + 40 + 10
    assert lost.scaling == 2 * 18 - 30
    assert lost.contention == 2 * (20 - 18) + (60 - 50) + 0 + 0
    assert lost.handover == 2 * 5 + 5 + 2 + 5 + 2 * 5
    assert lost.imbalance == 105 - 67
    assert lost.total == 2 * 110


def test_time_in_which_a_unit_waits_for_another_is_imbalance() -> None:
    """Unit 1 has nothing that it could run until unit 0 has ended the first segment."""
    made = graph((), (0,))
    lost = account(made, LANES, _trace((1, 0, 40), (2, 45, 50), duration=50), {1: [40, 5]})
    assert lost.imbalance == 40 + 10
    assert lost.handover == 5
    assert astuple(lost)[:3] == (45, 0, 0)
    assert lost.total == pytest.approx(100)
