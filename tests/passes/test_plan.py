from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from apollo_compile.errors import InfeasiblePlanError, InvariantError
from apollo_compile.ir import CostTable, Lane, Mode, Observations, Origin, Plan, SegmentGraph, SegmentId
from apollo_compile.ir.check import check_plan
from apollo_compile.json_form import to_json
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import lanes_for, make_plan, make_serial_plan, to_problem
from apollo_compile.planner import apart
from apollo_compile.planner.solve import Effort, solve
from apollo_compile.store.profiles import default_profile
from apollo_compile.target.lanes import lane_catalogue, lanes_for_two, with_network
from tests.builders import chains, costs, graph, most_at_once, random_costs, random_graph, random_lanes
from tests.planner.oracle import find_optimum


def planned(made: SegmentGraph, table: CostTable, lanes: tuple[Lane, ...], **options: Any) -> Plan:
    """Return the planner's plan, checked."""
    plan = make_plan(made, table, lanes=lanes, **options)
    check_plan(plan, made, table)
    return plan


@pytest.mark.parametrize("has_network", (False, True), ids=("alone", "several ranks"))
@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_legal(seed: int, has_network: bool) -> None:
    """On random graphs, lanes and costs; collectives have a lane without units beside those of any device."""
    rng = random.Random(seed)
    size, lanes = rng.randrange(1, 25), random_lanes(rng)
    chosen = sorted(rng.sample(range(size), rng.randrange(1, size + 1))) if has_network else []
    made = with_collectives(rng, size, chosen)
    table = on_network(random_costs(rng, made, lanes), chosen, rng.randrange(1, 100))
    lanes = with_network(lanes) if has_network else lanes
    planned(made, table, lanes, planner="greedy", work_s=0.2)


def test_independent_chains_run_side_by_side_if_that_beats_serial_by_the_margin() -> None:
    """Two equal chains whose layers gain little from a second unit; a margin below and a margin above the gain.

    The serial planner puts everything on lane 0 in graph order all the same, and its bound says that more is possible.
    """
    made, table, lanes = chains([100] * 6, [100] * 6, efficiency=0.6)
    plan = make_plan(made, table, lanes=lanes)
    assert plan.origin is Origin.OPTIMAL
    assert plan.makespan_ns == plan.undisturbed_ns == plan.lower_bound_ns == 600
    assert plan.gap == 0
    assert {assignment.lane for assignment in plan.assignments} == {1, 2}
    gain = 1 - plan.makespan_ns / plan.serial_ns
    assert make_plan(made, table, lanes=lanes, min_gain=gain - 0.01).origin is Origin.OPTIMAL
    assert make_plan(made, table, lanes=lanes, min_gain=gain + 0.01).origin is Origin.SERIAL
    serial = planned(made, table, lanes, planner="serial")
    assert [each.segment for each in serial.in_start_order()] == list(range(12)) and serial.origin is Origin.SERIAL
    assert serial.lower_bound_ns < serial.makespan_ns


def test_what_is_left_of_the_longer_branch_gets_all_units() -> None:
    """Two towers of which one ends early: layers of the other run on every unit then, since lanes are not for ever."""
    made, table, lanes = chains([100] * 8, [100] * 4, efficiency=0.8)
    plan = planned(made, table, lanes)
    wide = [a for a in plan.assignments if a.lane == 0]
    assert wide and all(a.segment < 8 for a in wide)
    narrow_end = max(a.end_ns for a in plan.assignments if a.segment >= 8)
    assert any(a.start_ns < narrow_end for a in plan.assignments if a.segment < 8 and a.lane != 0)
    assert plan.makespan_ns < 800  # the long tower alone on one unit


LITTLE = {"work_s": 0.1, "time_limit_s": 60.0}
"""Little work, and a limit that no machine reaches."""


@pytest.mark.parametrize(("num_branches", "units"), [(3, 16), (4, 4), (4, 16), (5, 16)])
def test_as_many_branches_run_at_once_as_there_are_lanes_for(num_branches: int, units: int) -> None:
    """Where few units are used best: shorter than on the lanes of splits in two, and never more than four at once."""
    made, table, lanes = chains(*num_branches * [[100] * 3], units=units, efficiency=0.4)
    plan = planned(made, table, lanes, **LITTLE)
    assert most_at_once(plan) == min(4, num_branches)
    in_two = planned(made, table, lanes_for_two(lanes), **LITTLE)
    assert plan.makespan_ns < in_two.makespan_ns and most_at_once(in_two) == 2


@pytest.mark.parametrize(
    ("towers", "efficiency", "num_lanes"),
    [
        ([[100] * 20], 0.4, 5),
        ([[100] * 20, [100] * 20], 0.4, 5),
        ([[100] * 20, [100] * 20, [90]], 0.4, 5),
        ([[100] * 20, [100] * 20, [100] * 20], 0.4, 11),
        ([[100] * 20, [100] * 20, [100] * 20], 1.0, 5),
    ],
)
def test_graphs_are_planned_on_the_lanes_that_they_gain_by(
    towers: list[list[int]], efficiency: float, num_lanes: int
) -> None:
    """Three branches need more than halves, unless they are as fast in turn; what is short does not count.

    A plan keeps the whole catalogue.
    """
    made, table, lanes = chains(*towers, units=16, efficiency=efficiency)
    assert lanes_for(made, table, lanes) == lanes[:num_lanes]
    plan = planned(made, table, lanes, planner="greedy", **LITTLE)
    assert plan.lanes == lanes
    assert {each.lane for each in plan.assignments} <= set(range(num_lanes))


@pytest.mark.parametrize("seed", range(6))
def test_more_lanes_are_searched_only_where_no_plan_on_few_is_as_short(seed: int) -> None:
    """So no plan is lost by having them: its makespan is under the bound of the few."""
    rng = random.Random(100 + seed)
    towers = [[rng.randrange(20, 200) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(3, 6))]
    made, table, lanes = chains(*towers, units=16, efficiency=rng.uniform(0.2, 1.0), handover_ns=3)
    few = lanes_for_two(lanes)
    plans = [make_plan(made, table, lanes=each, planner="greedy", **LITTLE) for each in (few, lanes)]
    if lanes_for(made, table, lanes) == few:
        assert plans[1].assignments == plans[0].assignments
    else:
        assert plans[1].makespan_ns < plans[0].lower_bound_ns


@pytest.mark.parametrize("seed", range(3))
def test_the_serial_plan_beside_another_has_its_bound(seed: int) -> None:
    """It is what the planner makes when it is asked for nothing else, but nobody computes the bound again."""
    rng = random.Random(seed)
    made = random_graph(rng, rng.randrange(2, 20))
    lanes = random_lanes(rng)
    table = random_costs(rng, made, lanes)
    plan = make_plan(made, table, lanes=lanes, planner="greedy", work_s=0.05)
    apart.stop_planner()
    serial = make_serial_plan(made, table, plan)
    assert apart.stop_planner() is None, "the planner's process was started"
    check_plan(serial, made, table)
    assert serial.lower_bound_ns == plan.lower_bound_ns
    expected = make_plan(made, table, lanes=lanes, planner="serial")
    assert serial.origin is Origin.SERIAL
    for name in ("assignments", "makespan_ns", "serial_ns"):
        assert getattr(serial, name) == getattr(expected, name)


@pytest.mark.parametrize(("works", "units"), [([[100] * 6], 2), ([[100] * 2, [100] * 2], 1)])
def test_what_gains_nothing_from_lanes_stays_serial(works: list[list[int]], units: int) -> None:
    """Nothing can run beside a single chain, and all units are faster than some; one unit has one lane."""
    made, table, lanes = chains(*works, units=units, efficiency=0.6)
    plan = make_plan(made, table, lanes=lanes)
    assert plan.origin is Origin.SERIAL and plan.makespan_ns == plan.serial_ns == plan.lower_bound_ns


def test_segments_without_a_mode_on_narrow_lanes_run_on_lane_0() -> None:
    """A table may lack unit counts, except all units: the message names the segment."""
    made, table, lanes = chains([100] * 3, [100] * 3, efficiency=0.6)
    narrowed = replace(table, modes=(table.modes[0][1:], *table.modes[1:]))
    assert planned(made, narrowed, lanes).assignments[0].lane == 0
    with pytest.raises(InvariantError, match=r"segment 0 \(m0\) needs a mode with all 2 units"):
        make_plan(made, replace(table, modes=tuple(modes[:1] for modes in table.modes)), lanes=lanes)


def test_neighbours_that_slow_each_other_are_part_of_the_times() -> None:
    """Side by side still wins, and the plan says by how much; when it no longer wins, the serial plan stands."""
    made, table, lanes = chains([100] * 6, [100] * 6, efficiency=0.6)
    shared = tuple(tuple(replace(mode, memory_share=1.0) for mode in modes) for modes in table.modes)

    little, much = (
        planned(made, replace(table, modes=shared, slowdown=((1.0, 1.0), (1.0, factor))), lanes)
        for factor in (1.1, 3.0)
    )
    assert (little.undisturbed_ns, little.makespan_ns) == (600, 660) and much.origin is Origin.SERIAL


def _peak_bytes(plan: Plan, graph: SegmentGraph) -> int:
    """Count, instant by instant, the bytes of buffers that the graph made and still needs."""
    ends = [assignment.end_ns for assignment in plan.assignments]
    peak = 0
    for instant in sorted(assignment.start_ns for assignment in plan.assignments):
        held = 0
        for buffer in graph.buffers:
            if buffer.producer is not None:
                last = max((ends[s] for s in (buffer.producer, *buffer.readers)), default=0)
                last = plan.makespan_ns if buffer.is_output else last
                held += buffer.num_bytes if plan.assignments[buffer.producer].start_ns <= instant < last else 0
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("seed", range(15))
def test_a_memory_quota_is_kept(seed: int) -> None:
    """At the peak of the serial plan there is always a plan, and none holds more at any instant."""
    rng = random.Random(seed)
    made = random_graph(rng, 9)
    lanes = lane_catalogue(2)
    table = random_costs(rng, made, lanes)
    quota = _peak_bytes(make_plan(made, table, lanes=lanes, planner="serial"), made)
    assert _peak_bytes(planned(made, table, lanes, memory_quota=quota, time_limit_s=1.0), made) <= quota


def test_a_memory_quota_keeps_two_large_workspaces_apart() -> None:
    """What segments take only while they run; side by side, both would."""
    made = graph((), (), (0,), (1,), (2, 3), sizes=[1] * 6)
    segments = tuple(replace(segment, workspace_bytes=100 * (segment.id in (2, 3))) for segment in made.segments)
    made = replace(made, segments=segments)
    table = estimate_costs(made, default_profile(2), Observations())
    equal = tuple(tuple(replace(mode, duration_ns=10, memory_share=0.0) for mode in modes) for modes in table.modes)
    table = CostTable(modes=equal, handover_ns=0)
    plans = [planned(made, table, lane_catalogue(2), memory_quota=quota) for quota in (None, 150, 250)]
    assert [plan.makespan_ns for plan in plans] == [30, 40, 30]
    with pytest.raises(InvariantError, match="holds 204 bytes at once"):
        check_plan(replace(plans[0], memory_quota=150), made, table)


def test_a_memory_quota_that_nothing_keeps_is_an_error_that_names_the_largest_segment() -> None:
    """With what it needs and what would help."""
    made, table, lanes = chains([100] * 3, [100] * 3)
    buffers = tuple(replace(buffer, num_bytes=3_000_000 if buffer.id == 2 else 1) for buffer in made.buffers)
    made = replace(made, buffers=buffers)
    with pytest.raises(InfeasiblePlanError, match=r"no plan for test fits .* 1 \(m1\) alone makes .*memory_quota"):
        make_plan(made, table, lanes=lanes, memory_quota=1_000_000)


def solve_anew() -> str:
    """Return the plan of a random graph; the time limit is far away."""
    rng = random.Random(5)
    made, lanes = random_graph(rng, 30), lane_catalogue(8)
    effort = Effort(work_s=2.0, time_limit_s=120.0)
    return json.dumps(to_json(solve(to_problem(made, random_costs(rng, made, lanes), lanes), effort)))


def test_two_processes_make_the_same_plan() -> None:
    """Byte for byte, whatever the hash seed and however busy the machine; this process is one of them."""
    code = "from tests.passes.test_plan import solve_anew; print(solve_anew())"
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    own = solve_anew()
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == f"{own}\n"
    assert json.loads(own)["stopped_early"] is False


def test_a_plan_says_what_was_tried() -> None:
    """Serial first; the plan is as short as the best candidate."""
    rng = random.Random(3)
    made = random_graph(rng, 20)
    lanes = lane_catalogue(4)
    plan = make_plan(made, random_costs(rng, made, lanes), lanes=lanes, min_gain=0.0)
    assert plan.candidates[0].name == "serial"
    assert plan.candidates[0].makespan_ns == plan.serial_ns
    assert min(candidate.makespan_ns for candidate in plan.candidates) == plan.makespan_ns
    assert to_json(plan)["seed"] == 0


def with_collectives(rng: random.Random, size: int, chosen: Sequence[int]) -> SegmentGraph:
    """Return a random graph with collectives in these segments, one after the other."""
    made = random_graph(rng, size)
    segments = list(made.segments)
    for number, segment in enumerate(chosen):
        after = {*segments[segment].after, *map(SegmentId, chosen[max(0, number - 1) : number])}
        segments[segment] = replace(segments[segment], has_collective=True, after=tuple(sorted(after)))
    return replace(made, segments=tuple(segments))


def on_network(table: CostTable, chosen: Collection[int], duration_ns: int) -> CostTable:
    """Return costs with a mode on no unit for these segments."""
    free = Mode(units=0, duration_ns=duration_ns, memory_bytes=0)
    return replace(
        table,
        modes=tuple(
            (replace(free, memory_bytes=modes[0].memory_bytes), *modes) if segment in chosen else modes
            for segment, modes in enumerate(table.modes)
        ),
    )


@pytest.mark.parametrize("seed", range(10))
def test_plans_with_a_network_are_optimal(seed: int) -> None:
    """For few segments, as an exhaustive search finds them."""
    rng = random.Random(seed)
    made = with_collectives(rng, 5, (1, 3))
    lanes = with_network(lane_catalogue(2))
    table = on_network(random_costs(rng, made, lanes[:-1]), (1, 3), rng.randrange(1, 60))
    assert planned(made, table, lanes, min_gain=0.0).undisturbed_ns == find_optimum(to_problem(made, table, lanes))


def test_collectives_run_beside_segments_that_have_all_units() -> None:
    """A chain of two layers, the sum of whose gradients are 100 each: the first sum runs beside the second layer."""
    made = graph((), (0,), (0,), (1,), after={3: (2,)}, collectives=(2, 3))
    lanes = with_network(lane_catalogue(1))
    table = on_network(costs(made, lanes[:-1], (100,)), (2, 3), 100)
    plan = make_plan(made, table, lanes=lanes)
    assert (plan.makespan_ns, plan.serial_ns) == (300, 400)
    assert [each.lane for each in plan.assignments[:3]] == [0, 0, 1]
