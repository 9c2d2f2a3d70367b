"""The soak: what it calls a failure."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest

from benchmarks.soak import ALLOWED_PER_EPISODE, EPISODES, WARM_ROUNDS, Episode, judge, soak
from tests.test_steady import SLICE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_soak_without_a_comparison_is_no_success() -> None:
    """Nothing grew in a run that was too short to tell."""
    (problem,) = judge([SLICE] * WARM_ROUNDS, 2)
    assert "give it more minutes" in problem
    assert judge([SLICE] * (WARM_ROUNDS + 1), 2) == []


def test_what_grew_after_the_warm_rounds_is_named() -> None:
    """What grew before them is not."""
    assert judge([replace(SLICE, resident_bytes=10), SLICE, SLICE], 2) == []
    (problem,) = judge([SLICE, SLICE, SLICE, replace(SLICE, num_threads=4)], 2)
    assert problem == "GREW: num_threads from 3 to 4"
    for each, num_problems in ((ALLOWED_PER_EPISODE, 0), (ALLOWED_PER_EPISODE + 1, 1)):
        last = replace(SLICE, resident_bytes=1000 + 4 * each)  # two rounds of two episodes
        assert len(judge([SLICE, SLICE, SLICE, last], 2)) == num_problems


def test_what_raises_or_is_wrong_is_a_problem_and_the_others_go_on() -> None:
    """Each is named, and the round still counts."""

    class Raising(Episode):
        def run(self) -> str | None:
            raise LookupError("no")

    class Wrong(Episode):
        def run(self) -> str | None:
            return "differs"

    class Right(Episode):
        def run(self) -> str | None:
            return None

    kinds = {"model": "layer norm", "mode": "train", "shapes": "one shape"}
    told: list[str] = []
    ticks = map(float, itertools.count())  # a look at the clock takes a second: four of them are a round
    rounds, problems = soak([Raising(**kinds), Wrong(**kinds), Right(**kinds)], 10, told.append, lambda: next(ticks))
    assert len(rounds) == 2
    assert len(problems) == 5
    assert all("LookupError" in problem for problem in problems[::2])
    assert problems[1::2] == ["differs"] * 2


def test_episodes_are_all_combinations() -> None:
    """Of models, modes and shapes, each once."""
    assert len(set(EPISODES)) == len(EPISODES) == 36
