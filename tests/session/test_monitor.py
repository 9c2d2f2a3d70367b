"""Traces become running medians per body and number of units."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from apollo_compile.ir import BodyId, CostTable, Observation, Observations, Plan, SegmentGraph, SegmentId, Span, Trace
from apollo_compile.planner.problem import Interference, TaskSchedule
from apollo_compile.planner.simulate import execute
from apollo_compile.session.monitor import (
    LEAST_WEIGHT,
    MAX_STEP,
    TOLERANCE,
    is_same_placement,
    observe_trace,
    should_replan,
)
from apollo_compile.target.lanes import lane_catalogue
from tests.builders import a_task, costs, graph, on_halves, plan


def _graph(*bodies: int) -> SegmentGraph:
    return graph(*[()] * len(bodies), bodies=bodies)


def _plan(letters: str) -> Plan:
    """A plan of independent segments; lane `*` has two units, `A` and `B` have one each."""
    return plan(graph(*[()] * len(letters)), letters)


def _costs(
    *durations_ns: int, share: float = 0.0, slowdown: tuple[tuple[float, float], tuple[float, float]] | None = None
) -> CostTable:
    """Segment i takes `durations_ns[i]` on one unit and half of it on two."""
    rows = [[duration, duration // 2] for duration in durations_ns]
    table = costs(graph(*[()] * len(rows)), lane_catalogue(2), *rows)
    modes = tuple(tuple(replace(mode, memory_share=share) for mode in row) for row in table.modes)
    return replace(table, modes=modes, slowdown=slowdown or ((1.0, 1.0), (1.0, 1.0)))


def _trace(plan: Plan, *durations_ns: int) -> Trace:
    spans = tuple(
        Span(segment=SegmentId(number), lane=plan.assignments[number].lane, start_ns=50, end_ns=50 + duration, core=-1)
        for number, duration in enumerate(durations_ns)
    )
    return Trace(spans=spans, duration_ns=max(durations_ns) + 50)


def _watch(durations_ns: list[int]) -> Observation:
    """Run one segment with these durations."""
    made, planned, observations = _graph(0), _plan("A"), Observations()
    for duration in durations_ns:
        observations = observe_trace(_trace(planned, duration), planned, made, _costs(100), observations)
    (entry,) = observations.entries
    return entry


def test_equal_segments_share_an_entry_and_units_keep_them_apart() -> None:
    """Two layers with one body on one lane each, and one on both units."""
    made, planned = _graph(4, 4, 4, 2), _plan("AB**")
    observations = observe_trace(_trace(planned, 100, 120, 70, 30), planned, made, _costs(*[100] * 4), Observations())
    assert observations.entries == (
        Observation(body=BodyId(2), units=2, count=1, median_ns=30),
        Observation(body=BodyId(4), units=1, count=2, median_ns=110),
        Observation(body=BodyId(4), units=2, count=1, median_ns=70),
    )


def test_entries_without_new_samples_stay() -> None:
    """A program that no longer runs a body says nothing about it."""
    kept = Observation(body=BodyId(9), units=1, count=3, median_ns=5)
    plan = _plan("A")
    observations = observe_trace(_trace(plan, 100), plan, _graph(0), _costs(100), Observations(entries=(kept,)))
    assert observations.entries == (Observation(body=BodyId(0), units=1, count=1, median_ns=100), kept)


@pytest.mark.parametrize("seed", range(10))
def test_steady_noise_settles_near_the_median(seed: int) -> None:
    """Fifty runs with a tenth of noise end within five percent of the true median."""
    rng = random.Random(seed)
    durations = [round(1_000_000 * rng.uniform(0.95, 1.05)) for _ in range(50)]
    entry = _watch(durations)
    assert entry.count == 50 and entry.median_ns == pytest.approx(statistics.median(durations), rel=0.05)


def test_one_disturbed_run_moves_the_estimate_by_a_bounded_step_and_a_lasting_change_is_followed() -> None:
    """A run a hundred times slower counts as one slow run, and fades; four times 1 / LEAST_WEIGHT runs are believed.

    A first run that is cold is forgotten: the second one shows what the body can do.
    """
    assert _watch([10_000, 1_000]) == Observation(body=BodyId(0), units=1, count=1, median_ns=1_000)
    assert _watch([1_000, 100_000]).median_ns == round(1_000 * (1 + MAX_STEP))
    assert _watch([1_000] * 20 + [100_000] + [1_000] * 60).median_ns < 1_050
    for before, after in ((1_000, 1_800), (1_800, 1_000)):
        found = _watch([before] * 100 + [after] * round(4 / LEAST_WEIGHT))
        assert found.median_ns == pytest.approx(after, rel=0.05)


def test_what_a_neighbour_cost_is_taken_out() -> None:
    """Memory beside memory takes 1.5 times as long; the shorter span had its neighbour all along, the longer half."""
    made, planned = _graph(0, 1), _plan("AB")
    table = _costs(100, 100, share=1.0, slowdown=((1.0, 1.0), (1.0, 1.5)))
    observations = observe_trace(_trace(planned, 150, 300), planned, made, table, Observations())
    assert [entry.median_ns for entry in observations.entries] == [100, 240]


def test_neighbours_cost_what_the_simulator_says() -> None:
    """Measuring an executed schedule gives back the durations it was made from."""
    slowdown = ((1.1, 1.2), (1.3, 1.9))
    tasks = 2 * [a_task(50, 100_000, 100_000, memory_share=0.4)]
    problem = on_halves(tasks, interference=Interference(slowdown=slowdown))
    execution = execute(problem, TaskSchedule(modes=(1, 2), starts=(0, 0), makespan=100_000))
    plan = _plan("AB")
    trace = _trace(plan, *(end - start for start, end in zip(execution.starts, execution.ends, strict=True)))
    table = _costs(100_000, 100_000, share=0.4, slowdown=slowdown)
    observations = observe_trace(trace, plan, _graph(0, 1), table, Observations())
    assert execution.makespan > 110_000
    assert [entry.median_ns for entry in observations.entries] == pytest.approx([100_000, 100_000], rel=1e-3)


def test_a_plan_stands_until_its_durations_are_wrong() -> None:
    """Only the modes that it uses count, by their share of its time."""
    plan = _plan("A*")
    within, beyond = round(1_500 * TOLERANCE * 0.9), round(1_500 * TOLERANCE * 1.2)
    assert not should_replan(plan, _costs(1_000, 1_000), _costs(1_000 + within, 1_000))
    assert should_replan(plan, _costs(1_000, 1_000), _costs(1_000 + beyond, 1_000))
    assert should_replan(plan, _costs(1_000, 1_000), _costs(1_000 - beyond, 1_000))
    assert not should_replan(plan, _costs(1_000, 1_000), _costs(1_000, 1_000 + within))


def test_plans_with_the_same_lanes_and_order_are_the_same_placement() -> None:
    """Times do not matter."""
    assert is_same_placement(_plan("AB"), _plan("AB")) and not is_same_placement(_plan("AB"), _plan("BA"))
