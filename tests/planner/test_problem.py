from __future__ import annotations

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.planner.problem import Mode, Problem, Schedule, Task


def two_lanes(*predecessors: tuple[int, ...], handover: int = 0) -> Problem:
    """Return tasks of 10 on half the device and 6 on all of it."""
    modes = (Mode(lane=0, duration=6), Mode(lane=1, duration=10), Mode(lane=2, duration=10))
    return Problem(
        tasks=tuple(Task(modes=modes, predecessors=before) for before in predecessors),
        lanes=(frozenset({0, 1}), frozenset({0}), frozenset({1})),
        atom_sizes=(1, 1),
        handover=handover,
    )


def test_tasks_on_disjoint_lanes_may_overlap() -> None:
    """Two narrow lanes share no atom."""
    assert two_lanes((), ()).is_valid(Schedule(lanes=(1, 2), starts=(0, 0), makespan=10))


@pytest.mark.parametrize(
    ("problem", "schedule", "family"),
    [
        (two_lanes((), ()), Schedule(lanes=(1, 1), starts=(0, 5), makespan=15), "(3)"),
        (two_lanes((), ()), Schedule(lanes=(0, 2), starts=(0, 5), makespan=15), "(3)"),
        (two_lanes((), (0,)), Schedule(lanes=(1, 2), starts=(0, 9), makespan=19), "(2)"),
        (two_lanes((), (0,), handover=3), Schedule(lanes=(1, 2), starts=(0, 12), makespan=22), "(2)"),
        (two_lanes((), (), handover=3), Schedule(lanes=(1, 0), starts=(0, 12), makespan=18), "(3)"),
        (two_lanes(()), Schedule(lanes=(1,), starts=(0,), makespan=9), "(4)"),
        (two_lanes(()), Schedule(lanes=(3,), starts=(0,), makespan=0), "(1)"),
    ],
)
def test_a_schedule_that_breaks_a_constraint_is_not_valid(problem: Problem, schedule: Schedule, family: str) -> None:
    """The violation names the constraint family of the docstring."""
    assert not problem.is_valid(schedule)
    assert any(violation.startswith(family) for violation in problem.violations(schedule))


def test_handing_over_on_the_same_lane_is_free() -> None:
    """Hand-over separates lanes, not tasks."""
    assert two_lanes((), (0,), handover=3).is_valid(Schedule(lanes=(1, 1), starts=(0, 10), makespan=20))


@pytest.mark.parametrize(
    "task",
    [
        Task(modes=(Mode(lane=1, duration=1),), predecessors=()),
        Task(modes=(Mode(lane=0, duration=0),), predecessors=()),
        Task(modes=(Mode(lane=0, duration=1), Mode(lane=0, duration=2)), predecessors=()),
        Task(modes=(Mode(lane=0, duration=1),), predecessors=(0,)),
    ],
)
def test_a_malformed_task_is_refused(task: Task) -> None:
    """Every task has lane 0, positive durations, one mode per lane and earlier predecessors."""
    with pytest.raises(InvariantError, match="task 0"):
        Problem(tasks=(task,), lanes=(frozenset({0}), frozenset({0})), atom_sizes=(1,))
