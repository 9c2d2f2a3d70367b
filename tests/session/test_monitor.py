"""Traces become running medians per body and number of units."""

from __future__ import annotations

import random
import statistics

import pytest

from apollo_compile.ir import (
    Assignment,
    BodyId,
    CostTable,
    Lane,
    LaneId,
    Mode,
    Observation,
    Observations,
    Origin,
    Plan,
    Quota,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Span,
    Trace,
    Work,
)
from apollo_compile.session.monitor import (
    LEAST_WEIGHT,
    MAX_STEP,
    TOLERANCE,
    is_same_placement,
    observe_trace,
    should_replan,
)


def _graph(*bodies: int) -> SegmentGraph:
    segments = tuple(
        Segment(
            id=SegmentId(number),
            name=f"s{number}",
            module="",
            body=BodyId(body),
            inputs=(),
            outputs=(),
            after=(),
            work=Work(),
        )
        for number, body in enumerate(bodies)
    )
    return SegmentGraph(name="g", role=Role.FORWARD, segments=segments, buffers=(), inputs=(), outputs=())


def _plan(*lanes: int) -> Plan:
    """Segment i on lane `lanes[i]`; lane 0 has two units, lanes 1 and 2 have one each."""
    return Plan(
        origin=Origin.GREEDY,
        lanes=(Lane(id=LaneId(0), units=(0, 1)), Lane(id=LaneId(1), units=(0,)), Lane(id=LaneId(2), units=(1,))),
        assignments=tuple(
            Assignment(
                segment=SegmentId(number),
                lane=LaneId(lane),
                quota=Quota(units=2 if lane == 0 else 1, memory_bytes=0),
                start_ns=0,
                duration_ns=1,
            )
            for number, lane in enumerate(lanes)
        ),
        makespan_ns=1,
        undisturbed_ns=1,
        serial_ns=1,
        lower_bound_ns=0,
    )


def _costs(
    *durations_ns: int, share: float = 0.0, slowdown: tuple[tuple[float, float], tuple[float, float]] | None = None
) -> CostTable:
    """Segment i takes `durations_ns[i]` on one unit and half of it on two."""
    return CostTable(
        modes=tuple(
            tuple(
                Mode(units=units, duration_ns=duration // units, memory_bytes=0, memory_share=share) for units in (1, 2)
            )
            for duration in durations_ns
        ),
        handover_ns=0,
        slowdown=slowdown or ((1.0, 1.0), (1.0, 1.0)),
    )


def _trace(plan: Plan, *durations_ns: int) -> Trace:
    spans = tuple(
        Span(segment=SegmentId(number), lane=plan.assignments[number].lane, start_ns=50, end_ns=50 + duration, core=-1)
        for number, duration in enumerate(durations_ns)
    )
    return Trace(spans=spans, duration_ns=max(durations_ns) + 50)


def _watch(durations_ns: list[int]) -> Observation:
    """Run one segment with these durations."""
    graph, plan, observations = _graph(0), _plan(1), Observations()
    for duration in durations_ns:
        observations = observe_trace(_trace(plan, duration), plan, graph, _costs(100), observations)
    (entry,) = observations.entries
    return entry


def test_equal_segments_share_an_entry_and_units_keep_them_apart() -> None:
    """Two layers with one body on one lane each, and one on both units."""
    graph, plan = _graph(4, 4, 4, 2), _plan(1, 2, 0, 0)
    observations = observe_trace(_trace(plan, 100, 120, 70, 30), plan, graph, _costs(*[100] * 4), Observations())
    assert observations.entries == (
        Observation(body=BodyId(2), units=2, count=1, median_ns=30),
        Observation(body=BodyId(4), units=1, count=2, median_ns=110),
        Observation(body=BodyId(4), units=2, count=1, median_ns=70),
    )


def test_entries_without_new_samples_stay() -> None:
    """A program that no longer runs a body says nothing about it."""
    kept = Observation(body=BodyId(9), units=1, count=3, median_ns=5)
    plan = _plan(1)
    observations = observe_trace(_trace(plan, 100), plan, _graph(0), _costs(100), Observations(entries=(kept,)))
    assert observations.entries == (Observation(body=BodyId(0), units=1, count=1, median_ns=100), kept)


@pytest.mark.parametrize("seed", range(10))
def test_steady_noise_settles_near_the_median(seed: int) -> None:
    """Fifty runs with a tenth of noise end within five percent of the true median."""
    rng = random.Random(seed)
    durations = [round(1_000_000 * rng.uniform(0.95, 1.05)) for _ in range(50)]
    entry = _watch(durations)
    assert entry.count == 50
    assert entry.median_ns == pytest.approx(statistics.median(durations), rel=0.05)


def test_a_cold_first_run_is_forgotten() -> None:
    """The second run shows what the body can do."""
    assert _watch([10_000, 1_000]) == Observation(body=BodyId(0), units=1, count=1, median_ns=1_000)


def test_one_disturbed_run_moves_the_estimate_by_a_bounded_step() -> None:
    """A run a hundred times slower counts as one slow run, and fades."""
    assert _watch([1_000, 100_000]).median_ns == round(1_000 * (1 + MAX_STEP))
    assert _watch([1_000] * 20 + [100_000] + [1_000] * 60).median_ns < 1_050


def test_a_lasting_change_is_followed() -> None:
    """A body that became 1.8 times slower, or faster, is believed after a few times 1 / LEAST_WEIGHT runs."""
    runs = round(4 / LEAST_WEIGHT)
    assert _watch([1_000] * 100 + [1_800] * runs).median_ns == pytest.approx(1_800, rel=0.05)
    assert _watch([1_800] * 100 + [1_000] * runs).median_ns == pytest.approx(1_000, rel=0.05)


def test_what_a_neighbour_cost_is_taken_out() -> None:
    """Memory beside memory takes 1.5 times as long; the shorter span had its neighbour all along, the longer half."""
    graph, plan = _graph(0, 1), _plan(1, 2)
    table = _costs(100, 100, share=1.0, slowdown=((1.0, 1.0), (1.0, 1.5)))
    observations = observe_trace(_trace(plan, 150, 300), plan, graph, table, Observations())
    assert [entry.median_ns for entry in observations.entries] == [100, 240]


def test_neighbours_cost_what_the_simulator_says() -> None:
    """Measuring an executed schedule gives back the durations it was made from."""
    from apollo_compile.planner.problem import ExecutionMode as TaskMode
    from apollo_compile.planner.problem import Interference, Problem, Task, TaskSchedule
    from apollo_compile.planner.simulate import execute

    slowdown = ((1.1, 1.2), (1.3, 1.9))
    problem = Problem(
        tasks=tuple(
            Task(
                modes=(TaskMode(duration=50), TaskMode(lane=lane, duration=100_000, memory_share=0.4)), predecessors=()
            )
            for lane in (1, 2)
        ),
        lanes=(frozenset({0, 1}), frozenset({0}), frozenset({1})),
        atom_sizes=(1, 1),
        interference=Interference(slowdown=slowdown),
    )
    execution = execute(problem, TaskSchedule(modes=(1, 1), starts=(0, 0), makespan=100_000))
    plan = _plan(1, 2)
    trace = _trace(plan, *(end - start for start, end in zip(execution.starts, execution.ends, strict=True)))
    table = _costs(100_000, 100_000, share=0.4, slowdown=slowdown)
    observations = observe_trace(trace, plan, _graph(0, 1), table, Observations())
    assert execution.makespan > 110_000
    assert [entry.median_ns for entry in observations.entries] == pytest.approx([100_000, 100_000], rel=1e-3)


def test_a_plan_stands_until_its_durations_are_wrong() -> None:
    """Only the modes that it uses count, by their share of its time."""
    plan = _plan(1, 0)
    within, beyond = round(1_500 * TOLERANCE * 0.9), round(1_500 * TOLERANCE * 1.2)
    assert not should_replan(plan, _costs(1_000, 1_000), _costs(1_000 + within, 1_000))
    assert should_replan(plan, _costs(1_000, 1_000), _costs(1_000 + beyond, 1_000))
    assert should_replan(plan, _costs(1_000, 1_000), _costs(1_000 - beyond, 1_000))
    assert not should_replan(plan, _costs(1_000, 1_000), _costs(1_000, 1_000 + within))


def test_plans_with_the_same_lanes_and_order_are_the_same_placement() -> None:
    """Times do not matter."""
    assert is_same_placement(_plan(1, 2), _plan(1, 2))
    assert not is_same_placement(_plan(1, 2), _plan(2, 1))
