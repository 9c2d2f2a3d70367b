"""Times that change for good reopen the comparison; nothing else does."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from apollo_compile.autotune.drift import DRIFT_STEPS
from tests.autotune.machine import (
    ENOUGH,
    INDUCTOR,
    PLAN,
    SERIAL,
    WINDOW,
    Graph,
    Machine,
    halves,
    slow_down,
)


def test_when_a_clear_lead_is_gone_inductor_competes_too() -> None:
    """It was not compiled at first; then a neighbour took the second core for good."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 10})
    machine = Machine(graph, backward)
    machine.run(ENOUGH)
    assert [v.winner for v in machine.verdicts] == [PLAN] and machine.num_prepared == 0
    slow_down({SERIAL: 12, PLAN: 14, INDUCTOR: 10}, graph, backward)
    machine.run(8 * WINDOW)
    assert [v.winner for v in machine.verdicts] == [PLAN, INDUCTOR] and machine.num_prepared == 1


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
