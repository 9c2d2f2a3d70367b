"""A comparison finds the fastest candidate in the noise of a shared machine."""

from __future__ import annotations

import itertools
import random

import pytest

from apollo_compile.autotune.comparison import MAX_ROUNDS, PER_TURN, Comparison, interval_of_median
from apollo_compile.ir import MIN_ROUNDS
from tests.autotune.machine import ENOUGH, INDUCTOR, PLAN, SERIAL, STEPS_PER_TURN, Graph, Machine


@pytest.mark.parametrize("seed", range(20))
def test_on_a_noisy_machine_the_winner_is_never_far_from_the_best(seed: int) -> None:
    """Drift, spikes and cold caches: what stays is within the noise of the fastest, whatever the times are."""
    chance = random.Random(seed)
    times = [{variant: chance.uniform(5, 15) for variant in (SERIAL, PLAN, INDUCTOR)} for _ in range(2)]
    graphs = [Graph(own) for own in times]
    machine = Machine(*graphs, seed=seed, noise=0.1, compile_s=0.01)
    machine.run(2 * ENOUGH)

    def time(variant: str) -> float:
        return sum(graph.times[variant] for graph in graphs)

    assert time(machine.verdicts[-1].winner) <= 1.05 * min(map(time, (SERIAL, PLAN, INDUCTOR)))


def test_noise_hides_no_plan_that_is_a_tenth_faster() -> None:
    """Steps take up to a fifth longer at random, and one in five twice as long: in nine comparisons of ten it wins."""
    winners = []
    for seed in range(100):
        machine = Machine(Graph({SERIAL: 10, PLAN: 9, INDUCTOR: 10}), seed=seed, noise=0.2, compile_s=0.01)
        while not machine.verdicts:
            machine.step()
        winners.append(machine.verdicts[0].winner)
    assert winners.count(PLAN) >= 85


def test_short_steps_are_timed_more_often() -> None:
    """So a plan that is a twentieth faster is found, of which turns of three steps miss one in five."""
    graph = Graph({SERIAL: 1, PLAN: 0.5})
    machine = Machine(graph)
    machine.run(ENOUGH)
    turns = [len(list(steps)) for _, steps in itertools.groupby(graph.used[: machine.verdicts[0].num_steps])]
    assert max(turns) == 2 * (1 + 20)  # the last of a round, and the first of the next, at 0.5 ms a step
    num_wins = 0
    for seed in range(50):
        machine = Machine(Graph({SERIAL: 0.4, PLAN: 0.38, INDUCTOR: 0.4}), seed=seed, noise=0.2, compile_s=0.01)
        while not machine.verdicts:
            machine.step()
        num_wins += machine.verdicts[0].winner == PLAN
    assert num_wins >= 45


def test_rounds_with_different_graphs_do_not_count() -> None:
    """A loop that skips the backward in some steps must not make the selection of those steps the winner."""
    forward, backward = (Graph({SERIAL: 11, PLAN: 9, INDUCTOR: 11}), Graph({SERIAL: 22, PLAN: 19, INDUCTOR: 22}))
    machine = Machine(forward, backward)
    chance = random.Random(0)
    machine.step()
    while not machine.verdicts:
        machine.step(*((0, 1) if chance.random() < 0.7 or forward.variant == PLAN else (0,)))
        assert len(forward.used) < 10 * ENOUGH
    assert machine.verdicts[0].winner == PLAN


def test_a_few_comparable_rounds_are_no_verdict() -> None:
    """Segments in turn win the only one; that the plan never had a backward in the others says nothing of its time."""
    forward, backward = Graph({SERIAL: 10, PLAN: 11}), Graph({SERIAL: 20, PLAN: 21})
    machine = Machine(forward, backward, is_compilable=False)
    while not machine.verdicts:
        is_early = len(forward.used) < 4 * STEPS_PER_TURN
        machine.step(*((0, 1) if is_early or forward.variant == SERIAL else (0,)))
        machine.autotuner._last = backward
    (verdict,) = machine.verdicts
    assert verdict.winner == PLAN and 0 < verdict.standings[0].num_rounds < MIN_ROUNDS


def test_a_comparison_ends_after_its_last_round_even_without_a_comparable_one() -> None:
    """Nothing that a user does keeps a slow candidate in the comparison for ever."""
    comparison = Comparison([SERIAL, PLAN])
    steps = 0
    while comparison.begin_step() is not None:
        steps += 1
    assert steps == comparison.num_steps == 2 * MAX_ROUNDS * STEPS_PER_TURN and comparison.winner() == SERIAL


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("time", "is_worth_it"), [(0.90, True), (0.96, True), (0.995, False), (1.0, False), (1.2, False)]
)
def test_a_plan_has_to_be_ahead_by_more_than_a_tie(seed: int, time: float, is_worth_it: bool) -> None:
    """Turns are timed as a whole, the first after a warm-up; equals end the comparison as early as losers do."""
    comparison = Comparison([SERIAL, PLAN], rules=PER_TURN)
    chance, times = random.Random(seed), {SERIAL: 1e9, PLAN: time * 1e9}
    turns: list[int] = []
    while (name := comparison.begin_step()) is not None:
        turns = [*turns, 1] if comparison.is_in_first_step else [*turns[:-1], turns[-1] + 1]
        if comparison.is_turn_complete:
            assert comparison.num_timed == 10
            comparison.record(round(times[name] * chance.uniform(1, 1.005)))
    assert turns == 2 * [16] + (len(turns) - 2) * [12]
    assert comparison.winner() == (PLAN if is_worth_it else SERIAL)
    assert comparison.num_rounds == MIN_ROUNDS


@pytest.mark.parametrize("count", [5, 8, 12])
def test_the_interval_holds_the_median_in_nine_cases_of_ten(count: int) -> None:
    """Whatever the distribution is."""
    chance = random.Random(0)
    holds = 0
    for _ in range(2000):
        low, high = interval_of_median([chance.expovariate(1.0) for _ in range(count)])
        holds += low <= 0.6931 <= high
    assert 0.88 * 2000 <= holds < 2000
    assert interval_of_median([]) == (1.0, 1.0) and interval_of_median([2.0]) == (2.0, 2.0)
