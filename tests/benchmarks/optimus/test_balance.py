"""Layers among stages, against all divisions."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.optimus.balance import balance_layers, sum_stages


@pytest.mark.parametrize("seed", range(30))
def test_the_most_expensive_stage_is_as_cheap_as_possible(seed: int) -> None:
    """Of all divisions into contiguous stages."""
    rng = random.Random(seed)
    costs = [rng.randint(0, 20) for _ in range(rng.randint(1, 9))]
    num_stages = rng.randint(1, len(costs))
    counts = balance_layers(costs, num_stages)
    assert len(counts) == num_stages and sum(counts) == len(costs) and min(counts) >= 1
    ways = itertools.combinations(range(1, len(costs)), num_stages - 1)
    best = min(max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(costs)))) for cuts in ways)
    assert max(sum_stages(costs, counts)) == best
    assert sum(sum_stages(costs, counts)) == sum(costs)
