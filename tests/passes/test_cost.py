from __future__ import annotations

import pytest

from apollo_compile.cost_model.roofline import predict
from apollo_compile.ir import BodyId, CostSource, Observation, Observations
from apollo_compile.ir.check import check_costs
from apollo_compile.passes.cost import estimate_costs
from tests.builders import graph
from tests.profiles import CPU


def test_equal_segments_cost_the_same_but_for_the_first() -> None:
    """The code of a body is cold when it runs for the first time: two kernels, 1 ns each."""
    costs = estimate_costs(graph((), (0,), (1,), bodies=(0, 1, 1)), CPU, Observations())
    first, second = costs.modes[1], costs.modes[2]
    assert [a.duration_ns - b.duration_ns for a, b in zip(first, second, strict=True)] == [2] * 4


def test_tensors_and_the_footprint_count() -> None:
    """The formula gets what the segment takes and returns, and the bytes of all buffers."""
    made = graph((), (0,))
    footprint = sum(buffer.num_bytes for buffer in made.buffers)
    segment = made.segments[1]
    expected = predict(
        segment.work, CPU, 4, num_tensors=len(segment.inputs) + len(segment.outputs), footprint=footprint, is_first=True
    )
    mode = estimate_costs(made, CPU, Observations()).modes[1][-1]
    assert (mode.duration_ns, mode.memory_share, mode.launch_share) == expected


def test_a_measured_median_replaces_the_formula_for_every_segment_with_that_body() -> None:
    """On the measured number of units only."""
    made = graph((), (0,), (1,), bodies=(0, 1, 1))
    seen = Observations(entries=(Observation(body=BodyId(1), units=2, count=5, median_ns=777),))
    costs, formula = estimate_costs(made, CPU, seen), estimate_costs(made, CPU, Observations())
    assert costs.modes[0] == formula.modes[0]
    assert [modes[1].duration_ns for modes in costs.modes[1:]] == [777, 777]
    assert costs.modes[1][1].source is CostSource.MEASURED
    assert [modes[1].memory_share for modes in costs.modes] == [modes[1].memory_share for modes in formula.modes]


@pytest.mark.parametrize(("units", "nearest"), [(1, 1), (2, 1), (3, 4), (4, 4)])
def test_a_measurement_elsewhere_scales_the_formula(units: int, nearest: int) -> None:
    """By measured over formula at the nearest number of units."""
    made = graph(())
    ratios = {1: 3, 4: 5}
    formula = {mode.units: mode.duration_ns for mode in estimate_costs(made, CPU, Observations()).modes[0]}
    seen = Observations(
        entries=tuple(
            Observation(body=BodyId(0), units=count, count=5, median_ns=ratio * formula[count])
            for count, ratio in ratios.items()
        )
    )
    mode = next(mode for mode in estimate_costs(made, CPU, seen).modes[0] if mode.units == units)
    assert mode.duration_ns == ratios[nearest] * formula[units]
    assert mode.source is (CostSource.MEASURED if units == nearest else CostSource.SCALED)


def test_there_is_one_mode_per_unit_count_of_the_catalogue_and_one_on_no_unit_where_that_was_measured() -> None:
    """Four units: a quarter, a half, three quarters, all.

    Without units a body waits for other ranks as long as on all of them; no other segment can do without.
    """
    made = graph((), (0,))
    costs = estimate_costs(made, CPU, Observations())
    check_costs(costs, made)
    assert [[mode.units for mode in modes] for modes in costs.modes] == [[1, 2, 3, 4]] * 2
    assert (costs.handover_ns, costs.slowdown) == (7, CPU.slowdown)
    assert {mode.source for modes in costs.modes for mode in modes} == {CostSource.FORMULA}
    entries = tuple(Observation(body=BodyId(1), units=units, count=1, median_ns=500) for units in (0, 4))
    costs = estimate_costs(made, CPU, Observations(entries=entries))
    check_costs(costs, made)
    assert [[mode.units for mode in modes] for modes in costs.modes] == [[1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [costs.modes[1][place].duration_ns for place in (0, 4)] == [500, 500]
    assert [costs.modes[1][place].source for place in (0, 1, 4)] == [
        CostSource.MEASURED,
        CostSource.SCALED,
        CostSource.MEASURED,
    ]
