from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from apollo_compile.planner.problem import ExecutionMode, Problem, Task, TaskSchedule
from apollo_compile.planner.simulate import serial_schedule
from benchmarks.rules import BASELINES
from tests.builders import random_problem, realistic_problems

LANES = (frozenset({0, 1, 2}), frozenset({0}), frozenset({1, 2}), frozenset({0, 1}), frozenset({2}))

UNITS = (4, 2, 2, 3, 1)
"""Of the lanes of `device`."""

Row = tuple[Mapping[int, int], Sequence[int]]
"""Durations by lane, and predecessors."""


def device(*rows: Row, handover: int = 0) -> Problem:
    """Return tasks on four units that can be cut 2 + 2 and 3 + 1."""
    tasks = []
    for durations, predecessors in rows:
        modes = (ExecutionMode(lane=lane, duration=duration) for lane, duration in durations.items())
        tasks.append(Task(modes=tuple(modes), predecessors=tuple(predecessors)))
    return Problem(tasks=tuple(tasks), lanes=LANES, atom_sizes=(2, 1, 1), handover=handover)


def scaled(work: int, overhead: int = 0) -> dict[int, int]:
    """Return durations of work that scales with the units, and of an overhead that does not."""
    return {lane: work // units + overhead for lane, units in enumerate(UNITS)}


def lanes_of(problem: Problem, schedule: TaskSchedule) -> list[int]:
    """Return the lane of every task."""
    return [problem.mode(schedule, task).lane for task in range(len(problem.tasks))]


# ------------------------------------------------------------------------------------------------------- every rule


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_valid(name: str) -> None:
    """On random problems, also where tasks lack modes on some lanes, with hand-overs, and on ones like real models."""
    problems = [problem for problem in realistic_problems().values() if len(problem.tasks) <= 100]
    assert len(problems) >= 5
    rngs = map(random.Random, range(20))
    problems += [random_problem(rng, rng.randrange(0, 40), rng.choice((2, 4))) for rng in rngs]
    for problem in problems:
        assert problem.violations(BASELINES[name](problem)) == ()


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_the_serial_schedule_where_there_is_nothing_to_decide(name: str) -> None:
    """On one lane, beside a lane without a partner, and where nothing of a chain can run side by side."""
    rng = random.Random(1)
    tasks = device(*[({0: rng.randrange(1, 9)}, ()) for _ in range(5)]).tasks
    chain = [(scaled(rng.randrange(40, 400)), (task - 1,) if task else ()) for task in range(12)]
    ways = ((frozenset({0, 1}),), (frozenset({0, 1}), frozenset({0})))
    problems = [Problem(tasks=tasks, lanes=lanes, atom_sizes=(1, 1)) for lanes in ways]
    for problem in (*problems, device(*chain, handover=3)):
        assert BASELINES[name](problem) == serial_schedule(problem)


# --------------------------------------------------------------------------------------------------------- one rule


ROUND_ROBIN, STREAMS, WAVES = "critical path + round-robin", "first-successor streams", "wavefront"


def alike(work: int, *predecessors: Sequence[int]) -> list[Row]:
    """Return tasks of equal work."""
    return [(scaled(work), each) for each in predecessors]


@pytest.mark.parametrize(
    ("name", "rows", "lanes"),
    [
        # a half for every branch: the second one stays with the second branch, the join with the first
        ("equal split", alike(40, (), (0,), (0,), (1,), (2,), (3, 4)), [1, 1, 2, 1, 2, 1]),
        # the half with less work for a new branch
        ("equal split", [(scaled(80), ()), *alike(40, (), ())], [1, 2, 2]),
        # one stream for the path with most tasks, whatever their times
        (ROUND_ROBIN, [(scaled(4), ()), (scaled(400), ()), *alike(4, (0,), (2,), ())], [1, 2, 1, 1, 2]),
        # streams 0, 0, 1, 0, 1, 2, of which the last is back on the first half; a join goes on from its first input
        (STREAMS, alike(40, (), (0,), (0,), (1,), (2,), (), (3, 4)), [1, 1, 2, 1, 2, 1, 1]),
        # quarters for chains of 3 to 1, halves for equal ones, everything for a task alone
        (
            WAVES,
            [
                (scaled(work, 10), before)
                for work, before in ((120, ()), (300, (0,)), (100, (0,)), (120, (1, 2)), (200, (3,)), (200, (3,)))
            ],
            [0, 3, 4, 0, 1, 2],
        ),
        # the whole device for the rest of a longer chain
        (WAVES, [(scaled(40, 10), (task - 1,) if task % 6 else ()) for task in range(8)], [1, 1, 0, 0, 0, 0, 2, 2]),
        # the whole device for a task without possible neighbours
        *((name, alike(40, (), (0,), (0,), (1, 2)), [0, 1, 2, 0]) for name in (ROUND_ROBIN, STREAMS, "HEFT")),
    ],
)
def test_a_rule_places_tasks_as_its_original_does(name: str, rows: list[Row], lanes: list[int]) -> None:
    """Worked out by hand."""
    problem = device(*rows)
    assert lanes_of(problem, BASELINES[name](problem)) == lanes


@pytest.mark.parametrize("name", ["equal split", "first-successor streams", "HEFT", "wavefront"])
@pytest.mark.parametrize("num_branches", [2, 3, 4])
def test_as_many_branches_take_as_many_lanes(name: str, num_branches: int) -> None:
    """Equal ones, on a device in halves, thirds and quarters, where a task takes as long on any number of units."""
    cuts = [range(part * 12 // count, (part + 1) * 12 // count) for count in (1, 2, 3, 4) for part in range(count)]
    task = Task(modes=tuple(ExecutionMode(lane=lane, duration=7) for lane in range(len(cuts))), predecessors=())
    problem = Problem(tasks=(task,) * num_branches, lanes=tuple(map(frozenset, cuts)), atom_sizes=(1,) * 12)
    schedule = BASELINES[name](problem)
    assert schedule.makespan == 7 and len(set(lanes_of(problem, schedule))) == num_branches


def test_round_robin_deals_side_tasks_out_over_all_side_streams() -> None:
    """On a device in thirds there are two side streams, and tasks go to them in turn."""
    durations = dict.fromkeys(range(4), 6)
    tasks = device((durations, ()), (durations, (0,)), *[(durations, ())] * 4).tasks
    lanes = (frozenset({0, 1, 2}), frozenset({0}), frozenset({1}), frozenset({2}))
    problem = Problem(tasks=tasks, lanes=lanes, atom_sizes=(1, 1, 1))
    assert lanes_of(problem, BASELINES["critical path + round-robin"](problem)) == [1, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(("handover", "start"), [(0, 4), (3, 7), (4, 22)])
def test_heft_leaves_room_for_hand_overs_around_a_gap(handover: int, start: int) -> None:
    """The device is taken until 4 and from 14 to 18; a task of 4 on a half of it goes between if there is room."""
    rows = [({0: 4}, ()), ({0: 1000, 1: 10 - 2 * handover}, (0,)), ({0: 4}, (1,)), ({0: 1000, 2: 4}, ())]
    problem = device(*rows, handover=handover)
    schedule = BASELINES["HEFT"](problem)
    assert problem.violations(schedule) == ()
    assert schedule.starts == (0, 4 + handover, 14, start)


def test_heft_places_by_rank_and_not_in_the_given_order() -> None:
    """The long chain behind task 1 makes it go first on the lane that both want."""
    want = {0: 1000, 1: 10}
    assert BASELINES["HEFT"](device((want, ()), (want, ()), ({0: 1000, 1: 20}, (1,)))).starts == (30, 0, 10)
