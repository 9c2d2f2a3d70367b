"""Every check accepts what its stage makes (the tests of the stages show that) and refuses what is broken here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.ir import Plan, Quota, check
from apollo_compile.target.lanes import lane_catalogue
from tests.builders import costs, graph, plan

GRAPH = graph((), (), (0, 1))
PLAN = plan(GRAPH, "AB*")
COSTS = costs(GRAPH, PLAN.lanes, [10, 10])


def with_assignment(index: int, **changes: object) -> Plan:
    """Return the plan with one assignment changed."""
    assignments = list(PLAN.assignments)
    assignments[index] = replace(assignments[index], **changes)  # type: ignore[arg-type]
    return replace(PLAN, assignments=tuple(assignments))


SLOWER = replace(with_assignment(2, start_ns=21), makespan_ns=31)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(PLAN, assignments=PLAN.assignments[:2]), "one assignment per segment"),
        (with_assignment(0, lane=5), "lane 5 does not exist"),
        (with_assignment(0, start_ns=-1), "starts at -1"),
        (with_assignment(0, quota=Quota(units=2, memory_bytes=100)), "has 1 units, the quota 2"),
        (with_assignment(0, quota=Quota(units=1, memory_bytes=7)), "none of its modes"),
        (with_assignment(0, duration_ns=9), "takes 9 ns, 10 ns even without neighbours"),
        (with_assignment(1, lane=1), "shares unit 0 with segment 0"),
        (with_assignment(2, start_ns=9), "depends on segment 0"),
        (replace(PLAN, makespan_ns=21), "the makespan is 21 ns"),
        (replace(PLAN, serial_ns=31), "serial_ns is 31"),
        (replace(PLAN, lower_bound_ns=21), "bound <= undisturbed makespan <= makespan"),
        (replace(PLAN, undisturbed_ns=21), "bound <= undisturbed makespan <= makespan"),
        (replace(PLAN, memory_quota=199), "holds 300 bytes at once, the memory quota is 199"),
        (SLOWER, "serial takes 30 ns, this plan 31 ns"),
    ],
)
def test_a_broken_plan_is_refused(broken: Plan, message: str) -> None:
    """The message says what and where."""
    check.check_plan(PLAN, GRAPH, COSTS)
    with pytest.raises(InvariantError, match=message):
        check.check_plan(broken, GRAPH, COSTS)


def test_a_segment_may_take_longer_beside_others_and_a_pinned_plan_longer_than_serial() -> None:
    """Interference is part of a plan's durations, and what a user pins is the user's; hand-overs need their time."""
    check.check_plan(replace(with_assignment(2, duration_ns=12), makespan_ns=22), GRAPH, COSTS)
    check.check_plan(replace(SLOWER, pinned=True), GRAPH, COSTS)
    with pytest.raises(InvariantError, match="until 13 ns"):
        check.check_plan(PLAN, GRAPH, replace(COSTS, handover_ns=3))


def test_a_plan_that_issues_collectives_in_another_order_is_refused() -> None:
    """Two branches communicate; whichever is ready first, all ranks keep the order of the graph."""
    made = graph((), (0,), (), (2,), (1, 3), collectives=(1, 3))
    table = costs(made, lane_catalogue(2), *[[10, 10]] * 5)
    swapped = plan(made, "AABB*", costs=table, order=(2, 3, 0, 1, 4))
    for wrong in (swapped, plan(made, "AABB*", costs=table)):
        with pytest.raises(InvariantError, match=r"segment 3 .*") as caught:
            check.check_plan(wrong, made, table)
        assert "before those of segment 1 (m1) are done" in str(caught.value)
        assert "exchange the wrong tensors or wait forever" in str(caught.value)
    ordered = graph((), (0,), (), (2,), (1, 3), after={3: (1,)}, collectives=(1, 3))
    for order in ((0, 2, 1, 3, 4), (2, 0, 1, 3, 4)):
        check.check_plan(plan(ordered, "AABB*", costs=table, order=order), ordered, table)


ROW = COSTS.modes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((), "at least one mode"),
        (tuple(reversed(ROW)), "ascending"),
        (ROW * 2, "ascending"),
        ((replace(ROW[0], memory_share=1.5), ROW[1]), "between 0 and 1"),
        ((replace(ROW[0], launch_share=1.5), ROW[1]), "between 0 and 1"),
        ((replace(ROW[0], duration_ns=0), ROW[1]), "at least 1 ns"),  # it would leave the start order open
    ],
)
def test_broken_costs_are_refused(row: tuple[object, ...], message: str) -> None:
    """Rows without modes, in the wrong order, repeated; shares of a duration are between zero and one."""
    check.check_costs(COSTS, GRAPH)
    with pytest.raises(InvariantError, match=message):
        check.check_costs(replace(COSTS, modes=(row, *COSTS.modes[1:])), GRAPH)  # type: ignore[arg-type]
