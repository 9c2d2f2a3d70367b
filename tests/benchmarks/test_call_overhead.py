"""What a call of a small graph is said to cost beside Inductor's."""

from __future__ import annotations

import random

import pytest

from apollo_compile.session import registry
from benchmarks.call_overhead import Comparison, compare, make_models


def _compared(inductor: list[float], apollo: list[float]) -> Comparison:
    return Comparison(model="one", mode="forward", runs="", inductor_ns=inductor, apollo_ns=apollo)


def test_a_round_that_was_slow_for_both_says_nothing_about_either() -> None:
    """Every call takes 3 us more than Inductor's, also in the rounds that take ten times as long."""
    inductor = [10_000.0, 100_000.0] * 10
    found = _compared(inductor, [each + 3_000 for each in inductor])
    assert found.differences_ns == pytest.approx([3_000] * 20)
    assert found.interval_ns() == pytest.approx((3_000, 3_000))


def test_the_interval_holds_the_difference_and_not_much_more() -> None:
    """Two sides that take the same time but for noise of 10 %."""
    rng = random.Random(0)
    sides = [[rng.gauss(20_000, 2_000) for _ in range(100)] for _ in range(2)]
    low, high = _compared(*sides).interval_ns()
    assert -1_500 < low < 0 < high < 1_500


@pytest.mark.soak
def test_a_model_is_timed_when_its_comparison_is_over() -> None:
    """And every graph of it says what runs."""
    model, value = make_models()["scale"]
    found = compare("scale", model, value, rounds=2)
    assert [each.mode for each in found] == ["forward", "step"]
    # a drift of the machine may have called for another comparison since, so that `is_settled` would say more
    selections = [graph.selection for each in registry.find_models(model) for graph in each.graphs]
    assert selections and all(each is None or each.verdict is not None for each in selections)
    for each in found:
        assert len(each.differences_ns) == 2 and min(each.inductor_ns) > 0
        assert [graph.split(":")[0].split("_")[1].split()[0] for graph in each.runs.split(", ")] == [
            "inference",
            "forward",
            "backward",
        ]
