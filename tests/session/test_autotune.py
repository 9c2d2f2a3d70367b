"""The autotuning between variants of a model, on machines whose speed the test makes up."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import RankError
from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.comparison import MAX_ROUNDS, MAX_STEPS_PER_TURN, MIN_ROUNDS, STEPS_PER_TURN, Comparison
from apollo_compile.session.drift import DRIFT_STEPS, WATCH_EVERY
from apollo_compile.session.procedure import CLEAR, COMPILE_SHARE, MIXTURE

SERIAL, LISTED, PLAN, STREAMS, PRIORITIES, OVERLAPPING, INDUCTOR = Variant


@dataclass(eq=False)
class Graph:
    """A graph whose variants take a given time."""

    times: Mapping[str, float]
    available: list[str] = field(default_factory=lambda: [SERIAL, PLAN])
    variant: str = PLAN
    is_settled: bool = True
    has_run: bool = False
    num_prepared: int = 0
    prepare_ns: int = 10**15
    """So long that nobody waits for it."""
    remembered: Verdict | None = None
    topic: str = "graph"
    used: list[str] = field(default_factory=list)
    kept: list[list[str]] = field(default_factory=list)
    """Ways that kept their memory, whenever that changed."""
    is_bound: bool = False
    is_compilable: bool = True
    """Whether Inductor can compile it whole."""

    def use(self, variant: str) -> None:
        assert variant == PLAN or variant in self.available or (self.is_bound and variant != INDUCTOR)
        self.variant = variant

    def prepare(self) -> None:
        self.num_prepared += 1
        self.prepare_ns = 0
        if self.is_compilable:
            self.available.append(INDUCTOR)

    def adopt_variant(self) -> str:
        if self.variant == LISTED:
            self.times, self.variant = {**self.times, PLAN: self.times[LISTED]}, PLAN
            self.available.remove(LISTED)
        return self.variant

    def keep(self, available: Collection[str]) -> None:
        found = sorted(set(available))
        if not self.kept or self.kept[-1] != found:
            self.kept.append(found)


class Machine:
    """Runs steps of a model with the noise of a shared machine: drift, spikes, and a cold step after every change."""

    def __init__(self, *graphs: Graph, seed: int = 0, noise: float = 0.0, ranks: Ranks | None = None) -> None:
        self.graphs, self.noise = graphs, noise
        self.verdicts: list[Verdict] = []
        self.tidied: list[int] = []
        """Steps that had begun whenever memory was to be given back."""
        self.autotuner = Autotuner(
            graphs, self.verdicts.append, ranks, trim_memory=lambda: self.tidied.append(len(graphs[0].used))
        )
        self.speed = 1.0
        self.num_watched = 0
        """Calls that the selection looked at."""
        self._random = random.Random(seed)
        self._last: list[str] = []

    def step(self, *only: int) -> float:
        """Run the graphs, or some of them; return the time."""
        total = 0.0
        self.speed *= 1 + self.noise / 10 * self._random.uniform(-1, 1)
        for index, graph in enumerate(self.graphs):
            if only and index not in only:
                continue
            is_watched = not self.autotuner.skips(graph)
            self.num_watched += is_watched
            if is_watched:
                self.autotuner.enter(graph)
            ns = 1e6 * graph.times[graph.variant] * self.speed * (1 + self.noise * self._random.random())
            if self._random.random() < self.noise:
                ns *= 2  # a neighbour's turn
            if graph.used and graph.used[-1] != graph.variant:
                ns *= 1.5  # cold caches
            if is_watched:
                self.autotuner.leave(graph, round(ns))
            graph.used.append(graph.variant)
            graph.has_run = True
            total += ns
        return total

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def halves(times: Mapping[str, float], **rest: Any) -> tuple[Graph, Graph]:
    """Return a forward and a backward that take these times together."""
    forward, backward = Graph({}, **rest), Graph({}, **rest)
    slow_down(times, forward, backward)
    return forward, backward


def slow_down(times: Mapping[str, float], forward: Graph, backward: Graph) -> None:
    """Let a forward and a backward take these times together from now on."""
    forward.times = {variant: time / 3 for variant, time in times.items()}
    backward.times = {variant: time - time / 3 for variant, time in times.items()}


ENOUGH = 5 * MAX_ROUNDS * STEPS_PER_TURN * 3

WINDOW = DRIFT_STEPS * WATCH_EVERY
"""Steps between two looks at how long they take."""


def test_a_comparison_says_in_which_round_it_is() -> None:
    """And who takes turns; before it and after it there is no round."""
    machine = Machine(Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 10}), noise=0.3)
    told = []
    while not machine.verdicts:
        machine.step()
        told.append(machine.autotuner.progress)
    rounds = list(dict.fromkeys(told))
    assert rounds[0] == f"a comparison begins, of at least {MIN_ROUNDS} rounds"
    assert rounds[1:4] == [f"round {number} of at least {MIN_ROUNDS} between {SERIAL}, {PLAN}" for number in (1, 2, 3)]
    assert f"round {MIN_ROUNDS + 1} of at most {MAX_ROUNDS} between {SERIAL}, {PLAN}" in rounds
    assert machine.autotuner.is_settled


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


def test_most_steps_after_the_verdict_are_not_looked_at() -> None:
    """What is decided costs nothing: one step in `WATCH_EVERY` is watched, and the first call of the next."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    before, steps = machine.num_watched, 100 * (WATCH_EVERY + 1)
    machine.run(steps)
    assert machine.num_watched - before <= 4 * steps / WATCH_EVERY
    assert len(machine.verdicts) == 1
    (alone,) = ranks_with(CountingStore(), {SERIAL: 10, PLAN: 7, INDUCTOR: 9})
    alone.run(2 * ENOUGH)
    before = alone.num_watched
    alone.run(ENOUGH)
    assert alone.num_watched == before  # with several ranks a verdict is final


def test_who_leaves_the_comparison_keeps_no_memory() -> None:
    """At once, while the others go on; what a mixture takes up again has it again."""
    available = [SERIAL, STREAMS, PRIORITIES, PLAN]
    forward = Graph(
        {SERIAL: 30, STREAMS: 20, PRIORITIES: 10, PLAN: 9.95, INDUCTOR: 9.5},
        available=list(available),
    )
    backward = Graph(
        {SERIAL: 30, STREAMS: 9, PRIORITIES: 10, PLAN: 9.95, INDUCTOR: 9.5},
        available=list(available),
    )
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    assert forward.kept == [
        sorted(available),
        sorted([PRIORITIES, PLAN]),
        sorted([INDUCTOR, PRIORITIES]),
        [INDUCTOR],
    ]
    assert backward.kept == [*forward.kept[:3], sorted([INDUCTOR, STREAMS])]


def test_graphs_that_are_bound_to_each_other_run_one_way() -> None:
    """One that gains nothing by it runs it all the same, and Inductor's only if it compiles all of them."""
    times = {STREAMS: 20, PRIORITIES: 10, PLAN: 10.5, INDUCTOR: 9.5}
    forward = Graph(
        {SERIAL: 30, **times},
        available=[SERIAL, STREAMS, PRIORITIES, PLAN],
        is_bound=True,
    )
    backward = Graph({SERIAL: 9, **times}, available=[SERIAL], is_bound=True, is_compilable=False)
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.selection == (PRIORITIES, PRIORITIES)
    assert {each.name for each in verdict.standings} == {
        SERIAL,
        STREAMS,
        PRIORITIES,
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


def test_memory_is_given_back_before_every_turn_and_before_inductor_compiles() -> None:
    """And once where an earlier process knew the winner: compiling left some behind."""
    graph = Graph({SERIAL: 10, PLAN: 7})
    machine = Machine(graph)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert machine.tidied == [1 + steps for steps in range(0, verdict.num_steps, STEPS_PER_TURN)]
    slower = Machine(Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 8}))
    slower.run(ENOUGH)
    num_turns = slower.verdicts[0].num_steps // STEPS_PER_TURN
    assert len(slower.tidied) == num_turns + 1  # before Inductor compiles, too
    again = Machine(Graph({SERIAL: 10, PLAN: 7}, remembered=earlier(PLAN)))
    again.run(ENOUGH)
    assert again.tidied == [1]


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


def test_every_graph_gets_its_own_way_where_that_is_fastest() -> None:
    """Forward gains by lanes, backward loses: neither pure selection is the best."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 10})
    backward = Graph({SERIAL: 20, PLAN: 23, INDUCTOR: 18})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.selection) == (MIXTURE, (PLAN, INDUCTOR))
    assert (forward.used[-1], backward.used[-1]) == (PLAN, INDUCTOR)


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


def test_all_graphs_of_a_step_run_the_same_selection() -> None:
    """The choice changes between steps, never between forward and backward."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    assert forward.used == backward.used
    assert set(forward.used) == {SERIAL, PLAN}


def test_the_comparison_waits_until_the_plans_are_final() -> None:
    """A graph that learns would be judged by a plan that it is about to drop; one that never runs is not waited for."""
    forward, backward = (
        Graph({SERIAL: 10, PLAN: 7}, is_settled=False),
        Graph({SERIAL: 20, PLAN: 15}, is_settled=False),
    )
    machine = Machine(forward, backward)
    machine.run(10)
    forward.is_settled = True
    machine.run(10)
    assert set(forward.used) == {PLAN}
    backward.is_settled = True
    machine.run(ENOUGH)
    assert machine.verdicts
    alone = (
        Graph({SERIAL: 10, PLAN: 7}),
        Graph({SERIAL: 20, PLAN: 15}, is_settled=False),
    )
    machine = Machine(*alone)
    for _ in range(ENOUGH):
        machine.step(0)
    assert machine.verdicts


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


def test_a_mixture_is_found_though_its_parts_lost_different_comparisons() -> None:
    """The plan's forward is the fastest, but the plan as a whole loses to its segments, and they to Inductor."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 9.8})
    backward = Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 18})
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    assert machine.verdicts[0].selection == (PLAN, INDUCTOR)


def test_forwards_in_a_row_belong_to_one_step() -> None:
    """A loop with six forwards and then their backwards is judged by both."""
    forward, backward = (
        Graph({SERIAL: 10, PLAN: 7, INDUCTOR: 11}),
        Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 22}),
    )
    machine = Machine(forward, backward)
    machine.step()
    for _ in range(ENOUGH):
        for graph, number in itertools.product((0, 1), range(6)):
            before = forward.variant, backward.variant
            machine.step(graph)
            assert (graph, number) == (0, 0) or (forward.variant, backward.variant) == before
    (verdict,) = machine.verdicts
    assert verdict.selection in ((SERIAL, SERIAL), (PLAN, SERIAL))
    assert all(standing.num_rounds >= MIN_ROUNDS for standing in verdict.standings)


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


def test_a_mixture_that_was_never_compared_does_not_stay() -> None:
    """It is a guess that has to beat the winner; here its steps have no backward."""
    forward = Graph({SERIAL: 10, PLAN: 6, INDUCTOR: 9.8})
    backward = Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 18})
    machine = Machine(forward, backward)
    for _ in range(2 * ENOUGH):
        machine.step(*((0,) if (forward.variant, backward.variant) == (PLAN, INDUCTOR) else (0, 1)))
        machine.autotuner._last = backward  # a step all the same
    assert machine.verdicts[0].selection == (INDUCTOR, INDUCTOR)


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


def test_an_interrupted_comparison_is_held_again() -> None:
    """As whoever works in a notebook interrupts a step in which Inductor compiles, and runs it again."""
    forward, backward = (
        Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 7}),
        Graph({SERIAL: 20, PLAN: 19.9, INDUCTOR: 15}),
    )
    prepare = forward.prepare

    def interrupt() -> None:
        forward.prepare = prepare  # type: ignore[method-assign]
        raise KeyboardInterrupt

    forward.prepare = interrupt  # type: ignore[method-assign]
    machine = Machine(forward, backward)
    with pytest.raises(KeyboardInterrupt):
        machine.run(ENOUGH)
    assert not machine.autotuner.is_settled and machine.verdicts == []
    machine.run(ENOUGH)
    assert [verdict.winner for verdict in machine.verdicts] == [INDUCTOR]
    assert machine.autotuner.is_settled


def test_an_interrupted_comparison_leaves_an_earlier_verdict_as_it_was() -> None:
    """The winner runs on; the graph for which the comparison was held is decided about later."""
    forward, backward = (
        Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 7}),
        Graph({SERIAL: 20, PLAN: 19.9, INDUCTOR: 15}),
    )
    machine = Machine(forward, backward)
    while not machine.verdicts:
        machine.step(0)
    assert machine.verdicts[0].winner == INDUCTOR
    prepare = backward.prepare

    def interrupt() -> None:
        backward.prepare = prepare  # type: ignore[method-assign]
        raise KeyboardInterrupt

    backward.prepare = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        machine.run(ENOUGH)
    assert forward.variant == INDUCTOR
    assert not machine.autotuner.is_settled
    machine.run(ENOUGH)
    assert machine.verdicts[-1].selection == (INDUCTOR, INDUCTOR)


def test_one_of_several_ranks_that_is_interrupted_runs_its_plan() -> None:
    """The others go on, and count its rounds as theirs."""
    (machine,) = ranks_with(CountingStore(), {SERIAL: 7, PLAN: 6.9})
    machine.graphs[0].prepare = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        machine.run(ENOUGH)
    machine.run(ENOUGH)
    assert machine.autotuner.is_settled and machine.verdicts == []
    assert [graph.variant for graph in machine.graphs] == [PLAN, PLAN]


def test_after_a_failure_all_graphs_run_their_plans() -> None:
    """Also if it strikes in the midst of another selection's turn, or while Inductor compiles."""
    forward, backward = Graph({SERIAL: 10, PLAN: 9.9}), Graph({SERIAL: 20, PLAN: 19.9})

    def fail() -> None:
        forward.use(SERIAL)
        backward.use(SERIAL)
        raise RuntimeError

    forward.prepare = fail  # type: ignore[method-assign]
    machine = Machine(forward, backward)
    with pytest.raises(RuntimeError):
        machine.run(ENOUGH)
    assert (forward.variant, backward.variant) == (PLAN, PLAN)
    machine.run(ENOUGH)
    assert (forward.variant, backward.variant, machine.verdicts) == (PLAN, PLAN, [])
    assert machine.autotuner.is_settled


def test_two_threads_in_one_model_do_no_harm() -> None:
    """Calls cross at every point; none raises, and the comparison ends."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(2 * ENOUGH):
                for graph in (forward, backward):
                    machine.autotuner.enter(graph)
                    graph.has_run = True
                    machine.autotuner.leave(graph, int(graph.times[graph.variant] * 1e6))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


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


def test_when_a_clear_lead_is_gone_inductor_competes_too() -> None:
    """It was not compiled at first; then a neighbour took the second core for good."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 10})
    machine = Machine(graph, backward)
    machine.run(ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN] and graph.num_prepared == 0
    slow_down({SERIAL: 12, PLAN: 14, INDUCTOR: 10}, graph, backward)
    machine.run(8 * WINDOW)
    assert [v.winner for v in machine.verdicts] == [PLAN, INDUCTOR] and graph.num_prepared == 1


def test_drift_reopens_the_comparison_and_a_repeated_verdict_makes_it_patient() -> None:
    """Times that change for good change the verdict; one that goes up and down does not cost a comparison each."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 10})
    machine = Machine(graph, backward)
    machine.run(ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN]
    slow_down({SERIAL: 8, PLAN: 14, INDUCTOR: 10}, graph, backward)  # the second core is gone
    machine.run(8 * WINDOW)
    assert [v.winner for v in machine.verdicts] == [PLAN, SERIAL]
    before = len(machine.verdicts)
    for turn in range(16):
        slow_down(
            {SERIAL: 8 * (1 + turn % 2), PLAN: 14 * (1 + turn % 2), INDUCTOR: 20},
            graph,
            backward,
        )
        machine.run(4 * WINDOW)
    assert 1 <= len(machine.verdicts) - before <= 5
    assert graph.used[-1] == SERIAL


def earlier(variant: str) -> Verdict:
    """Return a verdict of an earlier process."""
    standing = Standing(name=variant, step_ns=1.0, ratio=1.0, num_rounds=MIN_ROUNDS)
    return Verdict(winner=variant, selection=(variant,), standings=(standing,), num_steps=30, is_remembered=True)


def test_a_verdict_of_an_earlier_process_holds_until_times_drift() -> None:
    """Nothing competes before; then everything does, what was not compiled this time included."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 8}, remembered=earlier(PLAN))
    machine = Machine(graph, backward)
    assert machine.autotuner.is_settled
    machine.run(8 * WINDOW)
    assert (machine.verdicts, set(graph.used), graph.num_prepared) == ([], {PLAN}, 0)
    slow_down({SERIAL: 10, PLAN: 12, INDUCTOR: 8}, graph, backward)
    machine.run(8 * WINDOW)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.is_remembered, graph.used[-1]) == (INDUCTOR, False, INDUCTOR)
    assert {standing.name for standing in verdict.standings} == {SERIAL, PLAN, INDUCTOR}


def test_a_graph_that_no_earlier_process_knew_is_decided_about() -> None:
    """Whenever it runs for the first time, as a backward does that was left out so far."""
    forward = Graph({SERIAL: 10, PLAN: 7, INDUCTOR: 20}, remembered=earlier(PLAN))
    backward = Graph({SERIAL: 10, PLAN: 12, INDUCTOR: 20})
    machine = Machine(forward, backward)
    for _ in range(4):
        machine.step(0)
    assert machine.verdicts == []
    machine.run(ENOUGH)
    assert machine.verdicts[0].selection == (PLAN, SERIAL)


def test_a_graph_that_runs_for_the_first_time_after_the_verdict_is_decided_about() -> None:
    """A model that was evaluated with gradients for long, and then trained; its backward learns its plan first."""
    forward = Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 8})
    backward = Graph({SERIAL: 20, PLAN: 15, INDUCTOR: 16}, is_settled=False)
    machine = Machine(forward, backward)
    for _ in range(ENOUGH):
        machine.step(0)
    (first,) = machine.verdicts
    assert first.selection == (INDUCTOR, SERIAL) and (forward.num_prepared, backward.num_prepared) == (
        1,
        0,
    )
    assert machine.autotuner.is_settled
    machine.run(10)
    assert backward.used[-1] == PLAN and not machine.autotuner.is_settled and not machine.autotuner.is_comparing
    backward.is_settled = True
    machine.run(ENOUGH)
    assert [verdict.selection for verdict in machine.verdicts[1:]] == [(INDUCTOR, PLAN)]
    assert backward.num_prepared == 1 and machine.autotuner.is_settled
    assert (forward.used[-1], backward.used[-1]) == (INDUCTOR, PLAN)


def test_steady_times_never_reopen_it() -> None:
    """Noise is not drift."""
    machine = Machine(*halves({SERIAL: 10, PLAN: 7}), noise=0.05)
    machine.run(20)
    machine._random = random.Random(1)
    for _ in range(3000):
        machine.speed = 1.0
        machine.step()
    assert len(machine.verdicts) == 1


def settled_machine(forward: float, backward: float) -> Machine:
    """Return a machine whose plan won, and was watched for long; its graphs take these times."""
    graphs = [Graph({SERIAL: 2 * time, PLAN: time, INDUCTOR: 2 * time}) for time in (forward, backward)]
    machine = Machine(*graphs)
    machine.run(ENOUGH)
    assert [verdict.winner for verdict in machine.verdicts] == [PLAN]
    return machine


def multiply(graph: Graph, factor: float) -> None:
    """Let all variants of a graph take so many times as long."""
    graph.times = {variant: factor * time for variant, time in graph.times.items()}


@pytest.mark.parametrize("slower", [0, 1])
def test_drift_of_any_graph_of_a_step_reopens_the_comparison(slower: int) -> None:
    """A forward that takes 30 times as long is seen as a backward is, though it took a tenth of the step."""
    machine = settled_machine(5, 50)
    multiply(machine.graphs[slower], 30)
    machine.run(5 * WINDOW)
    assert len(machine.verdicts) == 2


@pytest.mark.parametrize(("forward", "backward"), [(100, 1), (1, 100)])
def test_drift_is_that_of_whole_steps(forward: float, backward: float) -> None:
    """A graph that takes ten times as long is no drift where that is a tenth of the step."""
    machine = settled_machine(forward, backward)
    multiply(machine.graphs[forward > backward], 10)
    machine.run(10 * WINDOW)
    assert len(machine.verdicts) == 1


def run_unrolled(machine: Machine, num_steps: int, sizes: Sequence[int]) -> None:
    """Take steps of several forwards and then their backwards; `sizes` says of how many, step by step."""
    for size in itertools.islice(itertools.cycle(sizes), num_steps):
        for graph, _ in itertools.product((0, 1), range(size)):
            machine.step(graph)


def test_how_many_forwards_come_before_their_backwards_is_no_drift() -> None:
    """Nor is it a new step that nobody looks at; what then takes longer is drift as ever."""
    machine = settled_machine(5, 50)
    before = machine.num_watched
    run_unrolled(machine, 10 * WINDOW, (4,))
    assert len(machine.verdicts) == 1
    assert machine.num_watched - before <= (2 * 4 + 1) * (10 * DRIFT_STEPS + 1)
    run_unrolled(machine, 10 * WINDOW, (1, 2, 1, 1, 6, 1, 3, 1, 1))
    assert len(machine.verdicts) == 1
    multiply(machine.graphs[0], 30)
    run_unrolled(machine, 6 * WINDOW, (4,))
    assert len(machine.verdicts) == 2


def test_gradients_that_are_accumulated_are_no_drift() -> None:
    """Each of its micro-batches is a forward and a backward, as a step without."""
    machine = settled_machine(5, 50)
    for _ in range(4 * WINDOW):
        for _ in range(3):
            machine.step()
    assert len(machine.verdicts) == 1


def test_evaluation_between_steps_is_no_drift() -> None:
    """Its forwards have no backward, and may be many."""
    machine = settled_machine(5, 50)
    chance = random.Random(0)
    for _ in range(10 * WINDOW):
        for _ in range(chance.choice((0, 0, 1, 20))):
            machine.step(0)
        machine.step()
    assert len(machine.verdicts) == 1
    multiply(machine.graphs[0], 30)
    machine.run(5 * WINDOW)
    assert len(machine.verdicts) == 2


def test_a_step_that_raises_is_no_sample() -> None:
    """Half of the backwards, and then half of the forwards, end early: what ran of these steps says nothing."""
    machine = settled_machine(5, 50)
    forward, backward = machine.graphs
    for failing, number in itertools.product((backward, forward), range(5 * WINDOW)):
        for graph in (forward, backward):
            fails = graph is failing and number % 2 == 0
            is_watched = not machine.autotuner.skips(graph)
            if is_watched:
                machine.autotuner.enter(graph)
                machine.autotuner.leave(graph, None if fails else round(1e6 * graph.times[graph.variant]))
            if fails:
                break
    assert len(machine.verdicts) == 1


def test_steps_of_another_thread_at_the_same_time_are_no_drift() -> None:
    """Calls that wait for each other take longer than the step does; alone again, a slower forward is drift."""
    machine = settled_machine(5, 50)
    forward, backward = machine.graphs
    machine.run(4 * WINDOW)  # how long a step takes is known

    def call(graph: Graph, *, begin: Callable[[], object], end: Callable[[], object]) -> None:
        is_watched = not machine.autotuner.skips(graph)
        if is_watched:
            machine.autotuner.enter(graph)
        begin()
        end()
        if is_watched:
            machine.autotuner.leave(graph, round(3e6 * graph.times[graph.variant]))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(8 * WINDOW):
            for graph in (forward, backward):
                has_begun, has_ended = threading.Event(), threading.Event()
                other = pool.submit(call, graph, begin=has_begun.set, end=lambda e=has_ended: e.wait(60))
                assert has_begun.wait(60)
                call(graph, begin=has_ended.set, end=lambda o=other: o.result(60) and None)
    assert len(machine.verdicts) == 1
    multiply(forward, 30)
    machine.run(5 * WINDOW)
    assert len(machine.verdicts) == 2


def test_a_comparison_ends_after_its_last_round_even_without_a_comparable_one() -> None:
    """Nothing that a user does keeps a slow selection in the game for ever."""
    comparison = Comparison({SERIAL: (SERIAL,), PLAN: (PLAN,)})
    steps = 0
    while comparison.begin_step() is not None:
        steps += 1
    assert steps == comparison.num_steps == 2 * MAX_ROUNDS * STEPS_PER_TURN
    assert comparison.winner() == SERIAL


def test_another_thread_in_the_middle_of_a_step_changes_nothing() -> None:
    """Only the graph that a step begins with moves the comparison on."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    machine.run(3)
    variant = forward.variant
    for _ in range(50):
        machine.autotuner.enter(backward)
        machine.autotuner.leave(backward, 10**6)
    assert forward.variant == backward.variant == variant
    machine.run(ENOUGH)
    assert machine.verdicts[0].winner == PLAN


def test_a_verdict_reads_as_one_line() -> None:
    """For the log."""
    graph = Graph({SERIAL: 10, PLAN: 7})
    machine = Machine(graph)
    machine.run(ENOUGH)
    assert str(machine.verdicts[0]) == "plan 7.00 ms a step, segments in turn 10.00 ms (1.43x); measured in 30 steps"


class CountingStore:
    """A store that counts how often it is asked."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_calls = 0

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self.num_calls += 1
        return self._store.compare_set(key, expected, desired)


def ranks_with(store: CountingStore, *times: Mapping[str, float], noise: float = 0.0) -> list[Machine]:
    """Return one machine per rank; each has a forward and a backward that take these times."""
    return [
        Machine(Graph(own), Graph(own), seed=rank, noise=noise, ranks=Ranks(store)) for rank, own in enumerate(times)
    ]


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


def test_after_the_verdict_no_step_asks_the_store() -> None:
    """Not even when the machine becomes slower: with several ranks the verdict is final."""
    store = CountingStore()
    ranks = ranks_with(store, *[{SERIAL: 10, PLAN: 7, INDUCTOR: 9}] * 2)
    for rank in ranks:
        rank.run(ENOUGH)
    asked = store.num_calls
    assert asked == len(ranks) * 2 * (1 + MIN_ROUNDS)  # Inductor competes too: a verdict is final
    for rank in ranks:
        rank.speed = 3.0
        rank.run(10 * WINDOW)
        assert len(rank.verdicts) == 1
        assert rank.autotuner.is_settled
    assert store.num_calls == asked


def run_in_step(ranks: Sequence[Machine], steps: int, seed: int) -> None:
    """Run all ranks as collectives make them run: nobody begins a step before all have begun the one before."""
    order = random.Random(seed)
    for _ in range(steps):
        for rank in order.sample(ranks, len(ranks)):
            rank.step()


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


def test_a_way_that_cannot_be_run_on_one_rank_stops_it() -> None:
    """Alone it would close the comparison and run its plans; here the others go on with theirs."""
    (machine,) = ranks_with(CountingStore(), {SERIAL: 7, PLAN: 10, INDUCTOR: 12})

    def fail(variant: str) -> None:
        if variant == SERIAL:
            raise RuntimeError("no thread can be started")

    machine.graphs[1].use = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RankError, match="autotuning failed here: RuntimeError: no thread can be started"):
            machine.run(ENOUGH)


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
