"""Times of many plans, evened out over rounds."""

from __future__ import annotations

import pytest

from benchmarks.plan_error import even_rounds


def test_slow_rounds_are_evened_out() -> None:
    """Plans of 1, 2 and 4 ms, in rounds that are up to three times slower for all of them, keep their ratios."""
    slowness = [1.0, 1.0, 3.0, 1.2, 1.0]
    times = [[(turn, round(usual * slow)) for turn, slow in enumerate(slowness)] for usual in (1_000, 2_000, 4_000)]
    for usual, samples in zip((1_000, 2_000, 4_000), even_rounds(times), strict=True):
        assert samples == pytest.approx([usual] * len(slowness))


def test_a_plan_that_is_slow_in_one_round_stays_so() -> None:
    """It was not the round: the others were as fast as ever."""
    times = [[(0, 100), (1, 100), (2, 100)], [(0, 100), (1, 300), (2, 100)], [(0, 50), (1, 50), (2, 50)]]
    assert even_rounds(times) == [[100, 100, 100], [100, 300, 100], [50, 50, 50]]
