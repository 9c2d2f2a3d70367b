"""The samplers that `benchmarks/balance.py` compares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.balance import BASELINE, OURS, PEER, SAMPLERS, invent_samples, loads_of, slowest_over_mean


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_all_samplers_have_the_same_steps_and_apollos_are_the_most_even(share: float) -> None:
    """So that only who gets which sample is compared; it is at least a tenth better than dealt in turn."""
    pytest.importorskip("transformers")
    samples = invent_samples(2_000, share)
    steps = {name: sampler(samples, 4, 8) for name, sampler in SAMPLERS.items()}
    for name, found in steps.items():
        assert len(found) == 62, name
        for own, others in zip(found, steps[BASELINE], strict=True):
            assert sorted(itertools.chain(*own)) == sorted(itertools.chain(*others)), name
    ratios = {name: slowest_over_mean(loads_of(found, samples)) for name, found in steps.items()}
    assert min(ratios, key=lambda name: ratios[name]) == OURS
    assert ratios[OURS] < 0.9 * ratios[BASELINE] and ratios[OURS] < ratios[PEER]


def test_loads_are_the_seconds_of_a_ranks_samples() -> None:
    """By phase; the share of samples with an image is the one that was asked for."""
    samples = invent_samples(1_000, 0.3)
    loads = loads_of([[[0, 1], [2]]], samples)
    np.testing.assert_allclose(loads, [[samples.seconds[:2].sum(axis=0), samples.seconds[2]]])
    assert slowest_over_mean(np.array([[[2.0, 0.0], [0.0, 2.0]]])) == 2.0
    assert 0.25 < (samples.seconds[:, 0] > 0).mean() < 0.35
