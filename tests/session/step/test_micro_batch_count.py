"""How many micro-batches a step has, where it is left open: by prediction, then by measuring."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from apollo_compile.session.step.micro_batch_count import MicroBatchCount

STEPS_TO_SETTLE = 3


def choose(
    predicted: Mapping[int, int | None], measured: Mapping[int, int], *, is_compared: bool = True
) -> tuple[str, list[int]]:
    """Return the verdict, and how many micro-batches each step had until nothing changed any more."""
    taken: list[int] = []
    chooser = MicroBatchCount(
        lambda count: taken.count(count) >= STEPS_TO_SETTLE, predicted.get, is_compared=is_compared
    )
    for _ in range(1000):
        taken.append(chooser.count)
        chooser.step_ended(measured.get(chooser.count, 10**9))
    return chooser.verdict, taken


def test_the_fastest_number_stays_after_all_have_been_compared() -> None:
    """Whatever was predicted, times decide among the promising."""
    verdict, taken = choose({1: 100, 2: 80, 4: 70}, {1: 10_000_000, 2: 8_000_000, 4: 9_000_000})
    assert verdict.startswith("2, by measuring")
    assert taken[:STEPS_TO_SETTLE] == STEPS_TO_SETTLE * [1]
    assert {1, 2, 4} == set(taken)
    assert set(taken[-100:]) == {2}


def test_one_micro_batch_competes_and_wins_ties() -> None:
    """A prediction alone does not replace it."""
    verdict, taken = choose({1: 100, 2: 50, 4: None}, {1: 8_000_000, 2: 8_010_000})
    assert verdict.startswith("1, by measuring")
    assert set(taken[-100:]) == {1}


@pytest.mark.parametrize("predicted", [{1: 100, 2: 99, 4: 101}, {1: 100}, {2: 10, 4: 10}, {}])
def test_numbers_that_promise_nothing_are_never_compiled(predicted: Mapping[int, int | None]) -> None:
    """Also where the program of one micro-batch cannot be predicted, so that there is nothing to compare with."""
    verdict, taken = choose(predicted, {1: 10})
    assert verdict.startswith("1")
    assert set(taken) == {1}


def test_predictions_decide_where_times_may_not() -> None:
    """With deterministic algorithms, or without autotuning."""
    verdict, taken = choose({1: 100, 2: 90, 4: 95}, {}, is_compared=False)
    assert verdict.startswith("2, by prediction")
    assert taken[STEPS_TO_SETTLE:] == (1000 - STEPS_TO_SETTLE) * [2]


def test_a_number_that_batches_cannot_be_split_into_is_given_up() -> None:
    """Its steps run whole and are not measured."""
    chooser = MicroBatchCount(lambda count: count == 1, {1: 100, 2: 50, 4: 50}.get, is_compared=True)
    for _ in range(200):
        chooser.step_ended(None if chooser.count > 1 else 1000)
    assert chooser.count == 1
    assert chooser.verdict.startswith("1")
