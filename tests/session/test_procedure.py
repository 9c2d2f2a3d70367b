"""What is compared in which order, alone and with several ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from apollo_compile.errors import RankError
from apollo_compile.session.comparison import MIN_ROUNDS, STEPS_PER_TURN
from apollo_compile.session.procedure import CLEAR, MIXTURE
from tests.session.machine import (
    COMPILE_SHARE,
    ENOUGH,
    INDUCTOR,
    LISTED,
    NARROW,
    PLAN,
    SERIAL,
    CountingStore,
    Graph,
    Machine,
    halves,
    ranks_with,
    run_in_step,
)


def test_a_clearly_faster_plan_stays_and_inductor_is_not_compiled() -> None:
    """Its pieces in turn are slower by more than Inductor is likely to make up."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.selection) == (PLAN, (PLAN, PLAN))
    assert [s.name for s in verdict.standings] == [PLAN, SERIAL]
    assert verdict.standings[1].ratio == pytest.approx(30 / 22, rel=0.01)
    assert verdict.standings[0].step_ns == pytest.approx(22e6, rel=0.01)
    assert verdict.num_steps == 2 * MIN_ROUNDS * STEPS_PER_TURN
    assert forward.num_prepared == backward.num_prepared == 0
    assert forward.used[-1] == backward.used[-1] == PLAN


def test_a_clearly_faster_plan_meets_inductor_once_the_compile_can_pay() -> None:
    """Then the loop has run for so long that the compile is a small part of it; here Inductor is faster after all."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 5}, prepare_ns=10**9 // 2)
    machine = Machine(graph, backward)
    machine.run(ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN] and graph.num_prepared == 0
    steps = 0
    while graph.num_prepared == 0:
        machine.step()
        steps += 1
        assert steps < 10_000
    assert (ENOUGH + steps) * 7e6 >= 1e9 / COMPILE_SHARE
    machine.run(ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN, INDUCTOR]
    assert (graph.num_prepared, graph.used[-1]) == (backward.num_prepared, backward.used[-1]) == (1, INDUCTOR)


def test_a_rival_that_cannot_be_compiled_is_tried_once() -> None:
    """However long the loop runs."""
    graph = Graph({SERIAL: 10, PLAN: 7}, prepare_ns=10**7)

    def fail() -> None:
        graph.num_prepared += 1
        graph.prepare_ns = 0

    graph.prepare = fail  # type: ignore[method-assign]
    machine = Machine(graph)
    machine.run(10 * ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN, PLAN]
    assert graph.num_prepared == 1


def test_a_list_schedule_that_is_faster_than_the_plan_becomes_the_plan() -> None:
    """A graph that has none runs its plan beside it."""
    forward = Graph(
        {SERIAL: 10, LISTED: 6, PLAN: 7, INDUCTOR: 10},
        available=[SERIAL, LISTED, PLAN],
    )
    backward = Graph({SERIAL: 20, PLAN: 15, INDUCTOR: 20})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.selection) == (LISTED, (PLAN, PLAN))
    assert {s.name for s in verdict.standings} == {SERIAL, LISTED, PLAN}
    assert LISTED in forward.used and LISTED not in backward.used
    assert (forward.used[-1], forward.times[forward.variant]) == (PLAN, 6)


def test_graphs_that_are_bound_to_each_other_run_one_variant() -> None:
    """One that gains nothing by it runs it all the same, and Inductor's only if it compiles all of them."""
    times = {NARROW: 10, PLAN: 10.5, INDUCTOR: 9.5}
    forward = Graph(
        {SERIAL: 30, **times},
        available=[SERIAL, NARROW, PLAN],
        is_bound=True,
    )
    backward = Graph({SERIAL: 9, **times}, available=[SERIAL], is_bound=True, is_compilable=False)
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.selection == (NARROW, NARROW)
    assert {each.name for each in verdict.standings} == {
        SERIAL,
        NARROW,
        PLAN,
    }
    assert forward.num_prepared == backward.num_prepared == 1
    evaluated = Graph({SERIAL: 12, **times}, available=[SERIAL, PLAN], is_bound=True)
    never = Graph({SERIAL: 30}, available=[SERIAL, PLAN], is_bound=True, variant=SERIAL)
    alone = Machine(evaluated, never)
    for _ in range(ENOUGH):
        alone.step(0)
    assert alone.verdicts[0].selection[0] == INDUCTOR and never.variant in never.available
    chain = Machine(Graph({SERIAL: 10, INDUCTOR: 9}, available=[SERIAL], variant=SERIAL, is_bound=True))
    chain.run(ENOUGH)
    assert chain.verdicts[0].selection == (INDUCTOR,) and len(chain.verdicts[0].standings) == 2


def test_inductor_wins_where_it_is_the_fastest_and_ties_go_to_it() -> None:
    """Never slower than what the user had; a plan that gains nothing is not run."""
    for inductor in (8.0, 9.95):
        graph = Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: inductor})
        machine = Machine(graph)
        machine.run(ENOUGH)
        (verdict,) = machine.verdicts
        assert verdict.winner == INDUCTOR
        assert graph.num_prepared == 1
        assert graph.used[-1] == INDUCTOR
        assert {s.name for s in verdict.standings} == {INDUCTOR, SERIAL, PLAN}


def test_a_plan_that_is_a_little_faster_beats_inductor() -> None:
    """Ahead by less than `CLEAR`, it has to prove it."""
    graph = Graph({SERIAL: 10, PLAN: 9.4, INDUCTOR: 10})
    machine = Machine(graph)
    machine.run(ENOUGH)
    assert CLEAR > 10 / 9.4
    assert (machine.verdicts[0].winner, graph.num_prepared, graph.used[-1]) == (PLAN, 1, PLAN)


def test_every_graph_gets_its_own_variant_where_that_is_fastest() -> None:
    """Forward gains by lanes, backward loses: neither pure selection is the best."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 10})
    backward = Graph({SERIAL: 20, PLAN: 23, INDUCTOR: 18})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.selection) == (MIXTURE, (PLAN, INDUCTOR))
    assert (forward.used[-1], backward.used[-1]) == (PLAN, INDUCTOR)


def test_a_mixture_is_found_though_its_parts_lost_different_comparisons() -> None:
    """The plan's forward is the fastest, but the plan as a whole loses to its segments, and they to Inductor."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 9.8})
    backward = Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 18})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    assert machine.verdicts[0].selection == (PLAN, INDUCTOR)


def test_a_mixture_that_was_never_compared_does_not_stay() -> None:
    """It is a guess that has to beat the winner; here its steps have no backward."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 9.8})
    backward = Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 18})
    machine = Machine(forward, backward)
    for _ in range(2 * ENOUGH):
        machine.step(*((0,) if (forward.variant, backward.variant) == (PLAN, INDUCTOR) else (0, 1)))
        machine.autotuner._last = backward  # a step all the same
    assert machine.verdicts[0].selection == (INDUCTOR, INDUCTOR)


def test_one_variant_needs_no_comparison_but_inductors() -> None:
    """A plan that runs in turn is Inductor's rival only by its pieces."""
    graph = Graph({SERIAL: 10, INDUCTOR: 10.5}, available=[SERIAL], variant=SERIAL)
    machine = Machine(graph)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.winner == SERIAL
    assert [s.name for s in verdict.standings] == [SERIAL, INDUCTOR]
    assert all(s.num_rounds >= MIN_ROUNDS for s in verdict.standings)


def test_a_rival_that_cannot_be_compiled_does_not_stop_the_comparison() -> None:
    """The graph logs it; what there is competes."""
    graph = Graph({SERIAL: 10, PLAN: 9.9})
    graph.prepare = lambda: None  # type: ignore[method-assign]
    machine = Machine(graph)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.winner in (SERIAL, PLAN)
    assert all(standing.num_rounds >= MIN_ROUNDS and standing.step_ns > 9e6 for standing in verdict.standings)


def test_where_there_is_nothing_to_compare_the_verdict_says_so() -> None:
    """A plan in turn whose only rival cannot be compiled."""
    graph = Graph({SERIAL: 10}, available=[SERIAL], variant=SERIAL)
    graph.prepare = lambda: None  # type: ignore[method-assign]
    machine = Machine(graph)
    machine.run(ENOUGH)
    assert list(map(str, machine.verdicts)) == ["segments in turn; nothing could be compared with it"]


@pytest.mark.parametrize(("seed", "scale"), [*((seed, 1.0) for seed in range(5)), (0, 0.1)])
def test_ranks_that_measure_different_times_run_the_same_in_every_step(seed: int, scale: float) -> None:
    """Alone, each of these ranks would choose another winner; what one step runs must not depend on the rank.

    Nor must the length of turns, where steps are short.
    """
    times: list[Mapping[str, float]] = [
        {SERIAL: 10, PLAN: 7, INDUCTOR: 12},
        {SERIAL: 7, PLAN: 10, INDUCTOR: 12},
        {SERIAL: 10, PLAN: 9.5, INDUCTOR: 5},
    ]
    times = [{variant: scale * time for variant, time in own.items()} for own in times]
    winners, num_steps = set(), round(ENOUGH / scale)
    for own in times:
        alone = Machine(Graph(own), Graph(own))
        alone.run(num_steps)
        winners.add(alone.verdicts[0].winner)
    assert len(winners) == 3

    order, ranks = random.Random(seed), ranks_with(CountingStore(), *times, noise=0.1)
    for _ in range(num_steps):
        for rank in order.sample(ranks, len(ranks)):  # whoever is first in this step
            rank.step()
    first, *others = ranks
    assert len(first.verdicts) == 1
    for rank in others:
        assert rank.verdicts == first.verdicts
        assert [graph.used for graph in rank.graphs] == [graph.used for graph in first.graphs]


def test_a_rank_far_ahead_waits_for_nobody_and_decides_for_all() -> None:
    """A step that another rank never runs blocks nothing."""
    ahead, behind = ranks_with(
        CountingStore(),
        {SERIAL: 10, PLAN: 7, INDUCTOR: 9},
        {SERIAL: 7, PLAN: 10, INDUCTOR: 9},
    )
    ahead.run(ENOUGH)
    behind.run(ENOUGH)
    assert ahead.verdicts == behind.verdicts
    assert ahead.verdicts[0].winner == PLAN
    assert ahead.graphs[0].used == behind.graphs[0].used


@pytest.mark.parametrize("seed", range(6))
def test_where_inductor_fails_on_one_rank_it_competes_on_none(seed: int) -> None:
    """Whoever is first in the step in which it is compiled; all run the same in every step, and end the same way."""
    ranks = ranks_with(CountingStore(), *[{SERIAL: 10, PLAN: 9, INDUCTOR: 5}] * 3)
    ranks[seed % 3].graphs[seed % 2].is_compilable = False
    run_in_step(ranks, ENOUGH, seed)
    for rank in ranks:
        assert [graph.num_prepared for graph in rank.graphs] == [1, 1]
        assert rank.verdicts == ranks[0].verdicts and rank.verdicts[0].winner == PLAN
        assert not rank.verdicts[0].has_compared(INDUCTOR)
        assert [graph.used for graph in rank.graphs] == [graph.used for graph in ranks[0].graphs]


def test_a_rank_that_cannot_run_what_competes_on_the_others_stops() -> None:
    """One that nothing held in step with them: they have begun a comparison with Inductor when it cannot compile."""
    ahead, behind = ranks_with(CountingStore(), *[{SERIAL: 10, PLAN: 9, INDUCTOR: 5}] * 2)
    behind.graphs[0].is_compilable = False
    ahead.run(ENOUGH)
    assert ahead.verdicts[0].winner == INDUCTOR
    for _ in range(3):  # also if somebody catches it
        with pytest.raises(RankError, match="'Inductor' competes on the other ranks, and this one cannot run 'Ind"):
            behind.run(ENOUGH)
    assert behind.verdicts == []


def test_a_rank_with_another_plan_takes_part_in_what_the_first_one_compares() -> None:
    """As one whose backward has run, or that has a list schedule, where the first rank has none."""
    first, second = ranks_with(CountingStore(), *[{SERIAL: 10, LISTED: 8, PLAN: 9, INDUCTOR: 12}] * 2)
    second.graphs[0].available.append(LISTED)
    first.graphs[1].variant = second.graphs[1].variant = SERIAL
    for _ in range(ENOUGH):
        first.step(0)
        second.step()
    assert first.verdicts[0].selection == second.verdicts[0].selection
    assert first.graphs[0].used[2:] == second.graphs[0].used[2:] and LISTED not in second.graphs[0].used


class Breakable(CountingStore):
    """A store that one rank cannot reach any more from some time on."""

    is_broken = False

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self.is_broken:
            raise dist.DistNetworkError("Connection reset by peer")
        return super().compare_set(key, expected, desired)


@pytest.mark.parametrize("steps", [1, 3 * STEPS_PER_TURN])
def test_a_rank_that_loses_the_store_stops_and_the_others_go_on(steps: int) -> None:
    """Before its comparison or in the midst of it: it cannot know what the others run."""
    store, lost = CountingStore(), Breakable()
    lost._store = store._store
    well, hurt = (ranks_with(each, {SERIAL: 10, PLAN: 9, INDUCTOR: 12})[0] for each in (store, lost))
    run_in_step([well, hurt], steps, 0)
    lost.is_broken = True
    for _ in range(2):
        with pytest.raises(RankError, match="Connection reset by peer"):
            hurt.run(ENOUGH)
    well.run(ENOUGH)
    assert well.verdicts and not hurt.verdicts


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ('{"times": {"plan": {"0": "fast"}}}', "expected a number"),
        ('{"times": {"plan": {"0": 1.0, "1": 1.0}}}', "is of .'plan'. on another rank"),
    ],
)
def test_rubbish_from_another_rank_stops_the_rank(times: str, reason: str) -> None:
    """Whoever wrote it goes by it."""

    class Misled(CountingStore):
        """Answers for the other rank when it is asked for the times of the first round."""

        def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
            """Set the key to rubbish."""
            version = desired.partition("\n")[0]
            return super().compare_set(key, expected, f"{version}\n{times}" if key.endswith("/round 0") else desired)

    (machine,) = ranks_with(Misled(), {SERIAL: 7, PLAN: 10})
    with pytest.raises(RankError, match=reason):
        machine.run(ENOUGH)
    assert [graph.variant for graph in machine.graphs] == [PLAN, PLAN]
