"""Assignments of samples to bins: legal, near the best, and independent of the steps beside them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from apollo_compile.distributed.loader import assign
from apollo_compile.distributed.loader.assign import add_up, assign_samples


def draw_costs(seed: int, steps: int, samples: int, phases: int = 2) -> assign.Integers:
    """Return costs of which many are 0, many are equal and a few are large."""
    rng = random.Random(seed)
    kinds = (lambda: 0, lambda: 1_000_000, lambda: rng.randrange(10**6), lambda: int(rng.lognormvariate(14, 1)))
    values = [rng.choice(kinds)() for _ in range(steps * samples * phases)]
    return np.array(values, dtype=np.int64).reshape(steps, samples, phases)


def step_time(costs: assign.Integers, bins: tuple[int, ...], num_bins: int) -> int:
    """Return the nanoseconds of one step, obviously right and slow."""
    return sum(
        max(sum(int(cost[phase]) for cost, own in zip(costs, bins, strict=True) if own == b) for b in range(num_bins))
        for phase in range(costs.shape[1])
    )


@pytest.mark.parametrize("num_bins", [2, 3])
def test_assignments_are_near_the_best_of_all(num_bins: int) -> None:
    """Within 10 % of it over 15 steps of 7 samples, and in no step beyond a quarter; the best comes from trying all."""
    costs = draw_costs(num_bins, 15, 7)
    found = assign_samples(costs, num_bins)
    ratios, best_sum, found_sum = [], 0, 0
    for step, bins in zip(costs, found, strict=True):
        every = itertools.product(range(num_bins), repeat=7)
        best = min(step_time(step, each, num_bins) for each in every if len(set(each)) == num_bins)
        ours = step_time(step, tuple(bins.tolist()), num_bins)
        assert ours >= best
        ratios.append(ours / best if best else 1.0)
        best_sum, found_sum = best_sum + best, found_sum + ours
    assert found_sum <= 1.1 * best_sum and max(ratios) <= 1.25


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_even", [False, True])
def test_every_bin_has_samples(seed: int, is_even: bool) -> None:
    """With as many samples as bins too, and where all cost nothing; even ones differ by one at most."""
    rng = random.Random(seed)
    num_bins = rng.randint(1, 6)
    num_samples = num_bins if seed == 0 else rng.randint(num_bins, 20)
    costs = draw_costs(seed, 12, num_samples, phases=rng.randint(1, 3))
    costs[0] = 0
    for bins in assign_samples(costs, num_bins, is_even=is_even):
        counts = np.bincount(bins, minlength=num_bins)
        assert len(counts) == num_bins and counts.min() >= 1
        assert not is_even or counts.max() - counts.min() <= 1


def test_samples_that_are_heavy_in_different_phases_go_together() -> None:
    """Where the sum of costs says that any pairs do."""
    costs = np.array([[[8, 0], [8, 0], [0, 8], [0, 8]]], dtype=np.int64)
    (bins,) = assign_samples(costs, 2)
    assert bins[0] != bins[1] and bins[2] != bins[3]


def test_steps_do_not_depend_on_those_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does not matter where an epoch is resumed, nor how many are computed at once."""
    costs = draw_costs(7, 9, 12)
    together = assign_samples(costs, 3)
    np.testing.assert_array_equal(together[4:7], assign_samples(costs[4:7], 3))
    monkeypatch.setattr(assign, "CHUNK", 1)
    np.testing.assert_array_equal(together, assign_samples(costs, 3))


def test_loads_are_sums_over_the_samples_of_a_bin() -> None:
    """Of every phase."""
    costs = draw_costs(3, 5, 8)
    bins = assign_samples(costs, 3)
    loads = add_up(costs, bins, 3)
    for step, number, phase in np.ndindex(5, 3, 2):
        expected = sum(int(costs[step, s, phase]) for s in range(8) if bins[step, s] == number)
        assert loads[step, number, phase] == expected
