"""Times that change for good reopen the comparison; nothing else does."""

from __future__ import annotations

import itertools
import random

import pytest

from apollo_compile.autotune.drift import DRIFT_SAMPLES
from tests.autotune.machine import ENOUGH, INDUCTOR, PLAN, SERIAL, WINDOW, Graph, Machine, Subject, halves, slow_down


def test_drift_reopens_the_comparison_and_a_repeated_verdict_makes_it_patient() -> None:
    """Inductor competes too once the lead is gone; times that go up and down do not cost a comparison each."""
    graph, backward = halves({SERIAL: 10, PLAN: 7, INDUCTOR: 10})
    machine = Machine(graph, backward)
    machine.run(ENOUGH)
    assert machine.num_prepared == 0
    slow_down({SERIAL: 8, PLAN: 14, INDUCTOR: 10}, graph, backward)  # the second core is gone
    machine.run(8 * WINDOW)
    assert [v.winner for v in machine.verdicts] == [PLAN, SERIAL] and machine.num_prepared == 1
    for turn in range(16):
        slow_down({SERIAL: 8 * (1 + turn % 2), PLAN: 14 * (1 + turn % 2), INDUCTOR: 20}, graph, backward)
        machine.run(4 * WINDOW)
    assert 1 <= len(machine.verdicts) - 2 <= 5 and graph.used[-1] == SERIAL


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
    """Return a machine whose plan won; its graphs take these times."""
    machine = Machine(*(Graph({SERIAL: 2 * time, PLAN: time, INDUCTOR: 2 * time}) for time in (forward, backward)))
    machine.run(ENOUGH)
    assert [verdict.winner for verdict in machine.verdicts] == [PLAN]
    return machine


@pytest.mark.parametrize("slower", [0, 1])
def test_drift_is_that_of_whole_steps(slower: int) -> None:
    """One graph that takes ten times as long is drift, unless that is a tenth of the step."""
    for times, num_verdicts in (((50, 50), 2), ((1, 100) if slower == 0 else (100, 1), 1)):
        machine = settled_machine(*times)
        graph = machine.graphs[slower]
        graph.times = {variant: 10 * time for variant, time in graph.times.items()}
        machine.run(6 * WINDOW)
        assert len(machine.verdicts) == num_verdicts


def test_several_forwards_before_their_backwards_are_one_step() -> None:
    """Nobody looks at each of them, and a steady number is no drift."""
    machine = settled_machine(5, 50)
    for is_measured in (False, True):
        before = machine.num_watched, len(machine.verdicts)
        for _, graph, _ in itertools.product(range(12 * WINDOW), (0, 1), range(4)):
            machine.step(graph)
        if is_measured:
            assert len(machine.verdicts) == before[1]
            assert machine.num_watched - before[0] <= (2 * 4 + 1) * (12 * DRIFT_SAMPLES + 1)


def test_comparisons_of_another_step_in_the_same_loop_are_no_drift() -> None:
    """Take no sample while a learner's other phase compares: its slow variants are in the times between looks."""
    watched, other = Subject({SERIAL: 20, PLAN: 10}).offer(SERIAL, PLAN), Subject({SERIAL: 100, PLAN: 10})
    for number in range(8 * WINDOW):
        if watched.verdicts and number < 3 * WINDOW and not other.tuner.is_comparing:
            other.offer(SERIAL, PLAN)
        other.now_ns = watched.now_ns
        other.step()
        watched.now_ns = other.now_ns
        watched.step()
    assert len(other.verdicts) > 3 and len(watched.verdicts) == 1


def test_what_runs_between_steps_is_no_sample() -> None:
    """Steps of another kind in between say nothing of these."""
    machine = settled_machine(5, 50)
    for number in range(20 * WINDOW):
        machine.step()
        if number > 10 * WINDOW:
            machine.now_ns += 10**9
            machine.tuner.spoil()
    assert len(machine.verdicts) == 1
