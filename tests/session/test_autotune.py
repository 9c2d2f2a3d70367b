"""Autotuning in a training loop: when it compares, what it runs meanwhile, and what stays if it fails."""

from __future__ import annotations

import itertools
import re
import threading

import pytest

from apollo_compile.errors import RankError
from apollo_compile.session.comparison import MAX_ROUNDS, MIN_ROUNDS, STEPS_PER_TURN
from apollo_compile.session.drift import WATCH_EVERY
from tests.session.machine import (
    ENOUGH,
    INDUCTOR,
    NARROW,
    PLAN,
    SERIAL,
    WINDOW,
    CountingStore,
    Graph,
    Machine,
    earlier,
    halves,
    ranks_with,
    slow_down,
)


def test_a_comparison_says_in_which_round_it_is() -> None:
    """About how many steps are left, and who takes turns; before it and after it there is no round."""
    machine = Machine(Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 10}), noise=0.3)
    told = []
    while not machine.verdicts:
        machine.step()
        told.append(machine.autotuner.progress)
    line = re.compile(r"(round \d+ of at \w+ \d+), about (\d+) steps left, between (.*)")
    found = [match.groups() for text in told if (match := line.fullmatch(text)) is not None]
    rounds = list(dict.fromkeys((name, rivals) for name, _, rivals in found))
    both = f"{SERIAL} and {PLAN}"
    assert told[0] == f"a comparison begins, of at least {MIN_ROUNDS} rounds"
    assert rounds[:3] == [(f"round {number} of at least {MIN_ROUNDS}", both) for number in (1, 2, 3)]
    assert (f"round {MIN_ROUNDS + 1} of at most {MAX_ROUNDS}", both) in rounds
    # Two comparisons of two variants, of which one step is done; a step later it is one less.
    least = 2 * 2 * MIN_ROUNDS * STEPS_PER_TURN
    assert [int(left) for _, left, _ in found[:4]] == [least - done for done in (1, 2, 3, 4)]
    assert machine.autotuner.is_settled


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
    available = [SERIAL, NARROW, PLAN]
    forward = Graph(
        {SERIAL: 20, NARROW: 10, PLAN: 9.95, INDUCTOR: 9.5},
        available=list(available),
    )
    backward = Graph(
        {SERIAL: 9, NARROW: 10, PLAN: 9.95, INDUCTOR: 9.5},
        available=list(available),
    )
    machine = Machine(forward, backward)
    machine.run(ENOUGH)
    assert forward.kept == [
        sorted(available),
        sorted([NARROW, PLAN]),
        sorted([INDUCTOR, NARROW]),
        [INDUCTOR],
    ]
    assert backward.kept == [*forward.kept[:3], sorted([INDUCTOR, SERIAL])]


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


def test_a_variant_that_cannot_be_run_on_one_rank_stops_it() -> None:
    """Alone it would close the comparison and run its plans; here the others go on with theirs."""
    (machine,) = ranks_with(CountingStore(), {SERIAL: 7, PLAN: 10, INDUCTOR: 12})

    def fail(variant: str) -> None:
        if variant == SERIAL:
            raise RuntimeError("no thread can be started")

    machine.graphs[1].use = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RankError, match="autotuning failed here: RuntimeError: no thread can be started"):
            machine.run(ENOUGH)
