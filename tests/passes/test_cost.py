from __future__ import annotations

from dataclasses import replace

import pytest

from apollo_compile.check import check_costs
from apollo_compile.cost_model.roofline import predict_ns
from apollo_compile.device import DeviceProfile
from apollo_compile.ir import BodyId, CostSource, Observation, Observations, Work
from apollo_compile.lanes import lane_catalogue
from apollo_compile.passes.cost import estimate_costs
from tests.builders import graph

PROFILE = DeviceProfile(
    name="test",
    source="default",
    units=4,
    flops_per_s=(1e9, 2e9, 3e9, 4e9),
    bytes_per_s=(1e9, 1.5e9, 1.8e9, 2e9),
    kernel_ns=10,
    parallel_ns=5,
    launch_ns=100,
    handover_ns=7,
)


def test_there_is_one_mode_per_unit_count_of_the_catalogue() -> None:
    """Four units: a quarter, a half, three quarters, all."""
    made = graph((), (0,))
    costs = estimate_costs(made, PROFILE, Observations())
    check_costs(costs, made)
    assert [[mode.units for mode in modes] for modes in costs.modes] == [[1, 2, 3, 4]] * 2
    assert costs.handover_ns == 7
    assert {mode.source for modes in costs.modes for mode in modes} == {CostSource.FORMULA}


@pytest.mark.parametrize(
    ("work", "units", "expected"),
    [
        (Work(flops=4000, bytes_read=100, bytes_written=100, kernels=2), 1, 100 + 2 * 10 + 4000 + 200),
        (Work(flops=4000, bytes_read=100, bytes_written=100, kernels=2), 4, 100 + 2 * 15 + 1000 + 100),
        (Work(flops=10, bytes_read=2000, bytes_written=1000, kernels=1), 2, 100 + 15 + 5 + 2000),
        (Work(), 1, 100),
    ],
)
def test_a_duration_is_fixed_times_plus_arithmetic_plus_bandwidth(work: Work, units: int, expected: int) -> None:
    """Figures done by hand."""
    assert predict_ns(work, PROFILE, units) == expected


def test_no_duration_is_zero() -> None:
    """Starts must order segments strictly."""
    assert predict_ns(Work(), replace(PROFILE, launch_ns=0), 1) == 1


def test_a_measured_median_replaces_the_formula_for_every_segment_with_that_body() -> None:
    """On the measured number of units only."""
    made = graph((), (0,), (1,), bodies=(0, 1, 1))
    seen = Observations(entries=(Observation(body=BodyId(1), units=2, count=5, median_ns=777),))
    costs, formula = estimate_costs(made, PROFILE, seen), estimate_costs(made, PROFILE, Observations())
    assert costs.modes[0] == formula.modes[0]
    assert [modes[1].duration_ns for modes in costs.modes[1:]] == [777, 777]
    assert costs.modes[1][1].source is CostSource.MEASURED
    assert costs.modes[1][2] == formula.modes[1][2]


@pytest.mark.parametrize(
    ("units", "sizes"),
    [
        (1, [1]),
        (2, [2, 1, 1]),
        (3, [3, 2, 1]),
        (4, [4, 2, 2, 3, 1]),
        (5, [5, 3, 2, 4, 1]),
        (132, [132, 66, 66, 99, 33]),
    ],
)
def test_the_catalogue_has_all_units_then_halves_then_quarters(units: int, sizes: list[int]) -> None:
    """Lanes of one split cover the device without overlap; no lane occurs twice."""
    lanes = lane_catalogue(units)
    assert [len(lane.units) for lane in lanes] == sizes
    assert len({lane.units for lane in lanes}) == len(lanes)
    for left, right in zip(lanes[1::2], lanes[2::2], strict=True):
        assert left.units + right.units == lanes[0].units


def test_a_device_without_units_is_refused() -> None:
    """The message says where to look."""
    with pytest.raises(ValueError, match="check the device profile"):
        lane_catalogue(0)
