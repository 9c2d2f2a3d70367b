"""The failures that a soak finds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from benchmarks.soak import ALLOWED_PER_EPISODE, EPISODES, WARM_ROUNDS, Episode, Outcome, Round, judge, soak
from tests.benchmarks.test_growth import SLICE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _round(**after: int) -> Round:
    return Round(after=replace(SLICE, **after), num_on_lanes=3)


def test_growth_after_the_warm_rounds_is_named() -> None:
    """Earlier growth is not."""
    assert judge([_round(resident_bytes=10), _round(), _round()], 2) == []
    (problem,) = judge([_round(), _round(), _round(), _round(num_threads=4)], 2)
    assert problem == "GREW: num_threads from 3 to 4"
    for each, num_problems in ((ALLOWED_PER_EPISODE, 0), (ALLOWED_PER_EPISODE + 1, 1)):
        last = _round(resident_bytes=1000 + 4 * each)  # two rounds of two episodes
        assert len(judge([_round(), _round(), _round(), last], 2)) == num_problems


def test_a_round_without_lanes_is_a_problem() -> None:
    """A soak is there for plans on lanes."""
    (problem,) = judge([_round(), _round(), replace(_round(), num_on_lanes=0), _round()], 2)
    assert problem == f"no graph of round {SLICE.last_step} ran on lanes"
    assert judge([replace(_round(), num_on_lanes=0)] * 3, 2, on_lanes=False) == []


def test_what_raises_or_is_wrong_is_a_problem_and_the_others_go_on() -> None:
    """Each is named, and the round still counts."""
    outcomes = {"wrong": Outcome(problem="differs"), "right": Outcome(num_on_lanes=2)}

    class Invented(Episode):
        def run(self, lanes: Mapping[str, Any] | None) -> Outcome:
            return outcomes[self.model]  # or a KeyError

    names = ("raising", *outcomes)
    episodes = [Invented(model=name, mode="train", shapes="one shape", on_lanes=True) for name in names]
    told: list[str] = []
    ticks = map(float, itertools.count())  # a look at the clock takes a second: four of them are a round
    rounds, problems = soak(episodes, 18, {}, told.append, lambda: next(ticks))
    assert [each.num_on_lanes for each in rounds] == [2, 2, 2, 2]
    assert len(problems) == 9
    assert all("KeyError" in problem for problem in problems[::2])
    assert problems[1::2] == ["differs"] * 4
    rounds, _ = soak(episodes, 0, {}, told.append)
    assert len(rounds) == WARM_ROUNDS + 1, "there is nothing to compare"


def test_episodes_are_all_combinations() -> None:
    """Of models, modes and shapes, each once; every model and every mode also runs on lanes."""
    assert len({replace(episode, on_lanes=True) for episode in EPISODES}) == len(EPISODES) == 60
    for name_of in (attrgetter("model"), attrgetter("mode"), attrgetter("shapes")):
        kinds = {(name_of(episode), episode.on_lanes) for episode in EPISODES}
        assert len(kinds) == 2 * len(set(map(name_of, EPISODES)))
