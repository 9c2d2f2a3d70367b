from __future__ import annotations

import random

import pytest

from apollo_compile.check import check_plan
from apollo_compile.errors import InvariantError
from apollo_compile.ir import Origin
from apollo_compile.lanes import lane_catalogue
from apollo_compile.passes.plan import make_plan
from tests.builders import chains, costs, graph, random_costs, random_graph, random_lanes


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_legal(seed: int) -> None:
    """On random graphs, lanes and costs."""
    rng = random.Random(seed)
    made = random_graph(rng, rng.randrange(1, 25))
    lanes = random_lanes(rng)
    table = random_costs(rng, made, lanes)
    check_plan(make_plan(made, table, lanes=lanes, iterations=100), made, table)


def test_independent_chains_run_side_by_side() -> None:
    """Two equal chains whose layers gain little from a second unit."""
    made, table, lanes = chains([100] * 6, [100] * 6, efficiency=0.6)
    plan = make_plan(made, table, lanes=lanes)
    assert plan.origin is Origin.GREEDY
    assert plan.makespan_ns == 600
    assert {assignment.lane for assignment in plan.assignments} == {1, 2}


def test_a_single_chain_stays_serial() -> None:
    """Nothing can run beside it, and all units are faster than some."""
    made, table, lanes = chains([100] * 6, efficiency=0.6)
    plan = make_plan(made, table, lanes=lanes)
    assert plan.origin is Origin.SERIAL
    assert plan.makespan_ns == plan.serial_ns == plan.lower_bound_ns


def test_a_plan_must_beat_serial_by_the_margin() -> None:
    """The same graph, a margin below and a margin above the gain."""
    made, table, lanes = chains([100] * 6, [100] * 6, efficiency=0.6)
    gain = 1 - make_plan(made, table, lanes=lanes).makespan_ns / make_plan(made, table, lanes=lanes).serial_ns
    assert make_plan(made, table, lanes=lanes, min_gain=gain - 0.01).origin is Origin.GREEDY
    assert make_plan(made, table, lanes=lanes, min_gain=gain + 0.01).origin is Origin.SERIAL


def test_the_serial_planner_puts_everything_on_lane_0_in_graph_order() -> None:
    """Also where a faster plan exists; its bound says so."""
    made, table, lanes = chains([100] * 6, [100] * 6, efficiency=0.6)
    plan = make_plan(made, table, lanes=lanes, planner="serial")
    check_plan(plan, made, table)
    assert plan.origin is Origin.SERIAL
    assert [assignment.segment for assignment in plan.in_start_order()] == list(range(12))
    assert plan.lower_bound_ns < plan.makespan_ns


def test_one_unit_has_only_the_serial_plan() -> None:
    """There is one lane."""
    made = graph((), (), (0, 1))
    lanes = lane_catalogue(1)
    assert make_plan(made, costs(made, lanes, [10]), lanes=lanes).origin is Origin.SERIAL


def test_segments_without_a_mode_on_narrow_lanes_run_on_lane_0() -> None:
    """A table may lack unit counts, except all units."""
    made, table, lanes = chains([100] * 3, [100] * 3, efficiency=0.6)
    narrowed = type(table)(modes=(table.modes[0][1:], *table.modes[1:]), handover_ns=0)
    plan = make_plan(made, narrowed, lanes=lanes)
    check_plan(plan, made, narrowed)
    assert plan.assignments[0].lane == 0


def test_a_table_without_all_units_is_refused() -> None:
    """The message names the segment."""
    made, table, lanes = chains([100] * 3, [100] * 3)
    narrowed = type(table)(modes=tuple(modes[:1] for modes in table.modes), handover_ns=0)
    with pytest.raises(InvariantError, match=r"segment 0 \(m0\) needs a mode with all 2 units"):
        make_plan(made, narrowed, lanes=lanes)
