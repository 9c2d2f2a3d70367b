"""A comparison finds the fastest selection in the noise of a shared machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from apollo_compile.session.comparison import (
    MAX_ROUNDS,
    MAX_STEPS_PER_TURN,
    MIN_ROUNDS,
    STEPS_PER_TURN,
    Comparison,
    Rules,
)
from tests.session.machine import (
    ENOUGH,
    INDUCTOR,
    PLAN,
    SERIAL,
    Graph,
    Machine,
)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_noisy_machine_the_winner_is_never_far_from_the_best(seed: int) -> None:
    """Drift, spikes and cold caches: what stays is within the noise of the fastest, whatever the times are."""
    chance = random.Random(seed)
    times = [{variant: chance.uniform(5, 15) for variant in (SERIAL, PLAN, INDUCTOR)} for _ in range(2)]
    graphs = [Graph(own, prepare_ns=10**7) for own in times]
    machine = Machine(*graphs, seed=seed, noise=0.1)
    machine.run(2 * ENOUGH)

    def time(choice: Sequence[str]) -> float:
        return sum(graph.times[variant] for graph, variant in zip(graphs, choice, strict=True))

    best = min(time([first] * 2) for first in (SERIAL, PLAN, INDUCTOR))
    assert time(machine.verdicts[-1].selection) <= 1.05 * best


def test_noise_hides_no_plan_that_is_a_tenth_faster() -> None:
    """Steps take up to a fifth longer at random, and one in five twice as long: in nine comparisons of ten it wins."""
    winners = []
    for seed in range(100):
        machine = Machine(Graph({SERIAL: 10, PLAN: 9, INDUCTOR: 10}, prepare_ns=10**7), seed=seed, noise=0.2)
        machine.run(ENOUGH)
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
        machine = Machine(
            Graph({SERIAL: 0.4, PLAN: 0.38, INDUCTOR: 0.4}, prepare_ns=10**7),
            seed=seed,
            noise=0.2,
        )
        machine.run(ENOUGH * MAX_STEPS_PER_TURN // STEPS_PER_TURN)
        num_wins += machine.verdicts[0].winner == PLAN
    assert num_wins >= 45


def test_rounds_with_different_graphs_do_not_count() -> None:
    """A loop that skips the backward in some steps must not make the selection of those steps the winner."""
    forward, backward = (
        Graph({SERIAL: 11, PLAN: 9, INDUCTOR: 11}),
        Graph({SERIAL: 22, PLAN: 19, INDUCTOR: 22}),
    )
    machine = Machine(forward, backward)
    chance = random.Random(0)
    machine.step()
    while not machine.verdicts:
        machine.step(*((0, 1) if chance.random() < 0.7 or forward.variant == PLAN else (0,)))
        assert len(forward.used) < 10 * ENOUGH
    assert machine.verdicts[0].winner == PLAN


def test_where_nothing_can_be_compared_the_plan_stays() -> None:
    """One selection's backward never runs: its steps are not those of the other."""
    forward, backward = (
        Graph({SERIAL: 10, PLAN: 11, INDUCTOR: 10}),
        Graph({SERIAL: 20, PLAN: 21, INDUCTOR: 20}),
    )
    machine = Machine(forward, backward)
    machine.step()
    for _ in range(2 * ENOUGH):
        if not machine.verdicts:
            machine.step(0)
            if forward.variant == PLAN:
                machine.step(1)
            else:
                machine.autotuner._last = None  # a step all the same
    assert machine.verdicts[0].winner == PLAN


def test_a_few_comparable_rounds_are_no_verdict() -> None:
    """Segments in turn win the only one; that the plan never had a backward in the others says nothing of its time."""
    forward, backward = Graph({SERIAL: 10, PLAN: 11}), Graph({SERIAL: 20, PLAN: 21})
    backward.prepare = forward.prepare = lambda: None  # type: ignore[method-assign]
    machine = Machine(forward, backward)
    while not machine.verdicts:
        is_early = len(forward.used) < 4 * STEPS_PER_TURN
        machine.step(*((0, 1) if is_early or forward.variant == SERIAL else (0,)))
        machine.autotuner._last = backward
    (verdict,) = machine.verdicts
    assert verdict.winner == PLAN
    assert 0 < verdict.standings[0].num_rounds < MIN_ROUNDS


def test_a_comparison_ends_after_its_last_round_even_without_a_comparable_one() -> None:
    """Nothing that a user does keeps a slow selection in the game for ever."""
    comparison = Comparison({SERIAL: (SERIAL,), PLAN: (PLAN,)})
    steps = 0
    while comparison.begin_step() is not None:
        steps += 1
    assert steps == comparison.num_steps == 2 * MAX_ROUNDS * STEPS_PER_TURN
    assert comparison.winner() == SERIAL


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("time", "is_worth_it"), [(0.90, True), (0.96, True), (0.995, False), (1.0, False), (1.2, False)]
)
def test_a_rival_of_what_runs_has_to_be_ahead_by_more_than_a_tie(seed: int, time: float, is_worth_it: bool) -> None:
    """A turn is timed as a whole; as soon as the rival has fallen behind, or is level, the comparison ends."""
    rules = Rules(steps_per_turn=12, untimed_steps=2, tie=0.02, is_first_kept=True)
    comparison = Comparison({SERIAL: (SERIAL,), PLAN: (PLAN,)}, rules=rules)
    chance, times = random.Random(seed), {SERIAL: 1e9, PLAN: time * 1e9}
    turns = []
    while (selection := comparison.begin_step()) is not None:
        assert comparison.is_in_first_step == (not turns or turns[-1] == 12)
        turns = [*turns, 1] if comparison.is_in_first_step else [*turns[:-1], turns[-1] + 1]
        if comparison.is_in_last_step:
            assert comparison.num_timed == 10
            comparison.record(0, round(times[selection[0]] * chance.uniform(1, 1.005)))
    assert turns == len(turns) * [12]
    assert comparison.winner() == (PLAN if is_worth_it else SERIAL)
    assert comparison.num_rounds == MIN_ROUNDS
