from __future__ import annotations

import random

import pytest

from apollo_compile.planner.simulate import Simulator, serial_schedule
from tests.builders import random_problem


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_is_valid_and_no_task_can_start_earlier(seed: int) -> None:
    """Semi-active: every start is 0 or equals something it waits for."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(1, 15), rng.choice((2, 4)))
    lanes = [rng.choice(task.modes).lane for task in problem.tasks]
    schedule = Simulator(problem).replay(range(len(problem.tasks)), lanes)
    assert problem.violations(schedule) == ()
    for task, start in enumerate(schedule.starts):
        ends = [schedule.starts[t] + (problem.duration(t, lanes[t]) or 0) for t in range(len(lanes))]
        causes = {end + gap for end in ends for gap in (0, problem.handover)}
        assert start == 0 or start in causes, task


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_stops_exactly_the_replays_that_exceed_it(seed: int) -> None:
    """A replay at its own makespan passes, one below does not."""
    rng = random.Random(seed)
    problem = random_problem(rng, 10, 2)
    simulator, lanes = Simulator(problem), [rng.choice(task.modes).lane for task in problem.tasks]
    schedule = simulator.replay(range(10), lanes)
    assert simulator.starts(range(10), lanes, schedule.makespan) == list(schedule.starts)
    assert simulator.starts(range(10), lanes, schedule.makespan - 1) is None


def test_the_serial_schedule_is_the_sum_of_all_on_lane_0() -> None:
    """No hand-over, no gap."""
    problem = random_problem(random.Random(1), 12, 4)
    assert serial_schedule(problem).makespan == sum(problem.duration(task, 0) or 0 for task in range(12))
    assert set(serial_schedule(problem).lanes) == {0}
