"""Autotuning in a training loop: when it compares, what it runs meanwhile, and what stays if it fails."""

from __future__ import annotations

import itertools

import pytest

from apollo_compile.autotune.drift import LOOK_EVERY
from apollo_compile.ir import MIN_ROUNDS
from tests.autotune.machine import (
    CLEAR,
    ENOUGH,
    INDUCTOR,
    PLAN,
    SERIAL,
    STEPS_PER_TURN,
    WINDOW,
    Graph,
    Machine,
    earlier,
    halves,
    slow_down,
)
from tests.builders import in_threads


def test_a_clearly_faster_plan_stays_and_inductor_is_not_compiled() -> None:
    """Its segments in turn are slower by more than Inductor is likely to make up.

    Forward and backward of a step run the same variant, and most steps after the verdict are not looked at.
    """
    machine = Machine(*halves({SERIAL: 30, PLAN: 22}))
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.winner == PLAN and [s.name for s in verdict.standings] == [PLAN, SERIAL]
    assert verdict.num_steps == 2 * MIN_ROUNDS * STEPS_PER_TURN
    assert str(verdict) == "plan 22.00 ms a step, segments in turn 30.00 ms (1.36x); measured in 30 steps"
    assert machine.num_prepared == 0
    assert machine.kept == [{INDUCTOR, SERIAL, PLAN}, {INDUCTOR, PLAN}]
    forward, backward = (graph.used for graph in machine.graphs)
    assert forward == backward and set(forward) == {SERIAL, PLAN} and forward[-1] == PLAN
    before, steps = machine.num_watched, 100 * LOOK_EVERY
    machine.run(steps)
    assert machine.num_watched - before <= 2 * steps / LOOK_EVERY


@pytest.mark.parametrize(
    ("plan", "inductor", "winner"), [(9.9, 8.0, INDUCTOR), (9.9, 9.95, INDUCTOR), (9.4, 10.0, PLAN)]
)
def test_inductor_wins_where_it_is_the_fastest_and_ties_go_to_it(plan: float, inductor: float, winner: str) -> None:
    """A plan that gains nothing does not run; one that is ahead by less than `CLEAR` has to prove it."""
    assert CLEAR > 10 / 9.4
    machine = Machine(Graph({SERIAL: 10, PLAN: plan, INDUCTOR: inductor}))
    machine.run(ENOUGH)
    (verdict,) = machine.verdicts
    assert verdict.winner == winner == machine.graphs[0].used[-1] and machine.num_prepared == 1
    assert {s.name for s in verdict.standings} == {INDUCTOR, SERIAL, PLAN}


def test_the_comparison_waits_until_the_plans_are_final() -> None:
    """A graph that learns would be judged by a plan that it is about to drop; one that never runs is not waited for."""
    forward, backward = halves({SERIAL: 30, PLAN: 22}, is_settled=False)
    machine = Machine(forward, backward)
    machine.run(10)
    forward.is_settled = True
    machine.run(10)
    assert set(forward.used) == {PLAN}
    backward.is_settled = True
    machine.run(ENOUGH)
    assert machine.verdicts
    machine = Machine(Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15}, is_settled=False))
    for _ in range(ENOUGH):
        machine.step(0)
    assert machine.verdicts


def test_forwards_in_a_row_belong_to_one_step() -> None:
    """A loop with six forwards and then their backwards is judged by both."""
    forward, backward = (Graph({SERIAL: 10, PLAN: 7, INDUCTOR: 11}), Graph({SERIAL: 20, PLAN: 26, INDUCTOR: 22}))
    machine = Machine(forward, backward)
    machine.step()
    for _ in range(ENOUGH):
        for graph, number in itertools.product((0, 1), range(6)):
            before = forward.variant, backward.variant
            machine.step(graph)
            assert (graph, number) == (0, 0) or (forward.variant, backward.variant) == before
    (verdict,) = machine.verdicts
    assert verdict.winner == SERIAL
    assert all(standing.num_rounds >= MIN_ROUNDS for standing in verdict.standings)


def test_an_interrupted_compile_is_done_again() -> None:
    """As whoever works in a notebook interrupts a step in which Inductor compiles, and runs it again."""
    machine = Machine(*halves({SERIAL: 30, PLAN: 29.8, INDUCTOR: 22}))
    machine.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        machine.run(ENOUGH)
    assert not machine.autotuner.is_settled and machine.verdicts == []
    machine.run(ENOUGH)
    assert [verdict.winner for verdict in machine.verdicts] == [INDUCTOR] and machine.autotuner.is_settled


def test_a_paused_tuner_leaves_the_plans() -> None:
    """Until it is told to compare."""
    machine = Machine(*halves({SERIAL: 20, PLAN: 30, INDUCTOR: 40}))
    machine.autotuner.is_paused = True
    machine.run(ENOUGH)
    assert set(machine.graphs[0].used) == {PLAN} and machine.num_watched == 0 and machine.autotuner.is_settled
    machine.autotuner.resume()
    machine.run(ENOUGH)
    assert machine.verdicts[0].winner == SERIAL


def test_two_threads_in_one_model_do_no_harm() -> None:
    """Calls cross at every point; none raises, and the comparison ends."""
    forward, backward = Graph({SERIAL: 10, PLAN: 7}), Graph({SERIAL: 20, PLAN: 15})
    machine = Machine(forward, backward)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(2 * ENOUGH):
                for graph in (forward, backward):
                    machine.autotuner.enter(graph)
                    graph.has_run = True
                    machine.autotuner.leave(graph, int(graph.times[graph.variant] * 1e6))
        except BaseException as error:
            failures.append(error)

    in_threads(work, 3)
    assert failures == []


def test_a_verdict_of_an_earlier_process_holds_until_times_drift() -> None:
    """Nothing is compared before; then everything is, what lost there and is compiled only now included."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 8}, remembered=earlier(PLAN, INDUCTOR, SERIAL))
    machine = Machine(graph, backward)
    assert machine.autotuner.is_settled
    machine.run(8 * WINDOW)
    assert (machine.verdicts, set(graph.used), machine.num_prepared) == ([], {PLAN}, 0)
    slow_down({SERIAL: 10, PLAN: 12, INDUCTOR: 8}, graph, backward)
    machine.run(8 * WINDOW)
    (verdict,) = machine.verdicts
    assert (verdict.winner, verdict.is_remembered, graph.used[-1]) == (INDUCTOR, False, INDUCTOR)
    assert {standing.name for standing in verdict.standings} == {SERIAL, PLAN, INDUCTOR}


def test_a_graph_that_no_earlier_process_knew_is_decided_about() -> None:
    """Whenever it runs for the first time, as a backward does that was left out so far."""
    forward = Graph({SERIAL: 10, PLAN: 7, INDUCTOR: 20}, remembered=earlier(PLAN))
    machine = Machine(forward, Graph({SERIAL: 10, PLAN: 15, INDUCTOR: 20}))
    for _ in range(4):
        machine.step(0)
    assert machine.verdicts == []
    machine.run(ENOUGH)
    assert machine.verdicts[0].winner == SERIAL


def test_a_graph_that_runs_for_the_first_time_after_the_verdict_is_decided_about() -> None:
    """A model that was evaluated with gradients for long, and then trained; its backward learns its plan first."""
    forward = Graph({SERIAL: 10, PLAN: 9.9, INDUCTOR: 8})
    backward = Graph({SERIAL: 20, PLAN: 10, INDUCTOR: 16}, is_settled=False)
    machine = Machine(forward, backward)
    for _ in range(ENOUGH):
        machine.step(0)
    assert [verdict.winner for verdict in machine.verdicts] == [INDUCTOR] and machine.autotuner.is_settled
    machine.run(2 * LOOK_EVERY)
    assert backward.used[-1] == PLAN and not machine.autotuner.is_settled
    backward.is_settled = True
    machine.run(ENOUGH)
    assert [verdict.winner for verdict in machine.verdicts[1:]] == [PLAN] and machine.autotuner.is_settled


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
