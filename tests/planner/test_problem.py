from __future__ import annotations

import pytest

from apollo_compile.planner.problem import ExecutionMode, Interference, Problem, ResourceHold, Task, TaskSchedule
from tests.builders import a_task, on_halves


def two_lanes(*predecessors: tuple[int, ...], handover: int = 0) -> Problem:
    """Return tasks of 10 on half the device and 6 on all of it."""
    return on_halves((a_task(6, 10, 10, before=before) for before in predecessors), handover=handover)


def without_lanes(*predecessors: tuple[int, ...]) -> Problem:
    """Return tasks of 4 that need 3 of a renewable resource, or of 9 that need 1; there are 5."""
    modes = (ExecutionMode(duration=4, demands=(3,)), ExecutionMode(duration=9, demands=(1,)))
    return Problem(tasks=tuple(Task(modes=modes, predecessors=before) for before in predecessors), capacities=(5,))


@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        (two_lanes((), ()), TaskSchedule(modes=(1, 2), starts=(0, 0), makespan=10)),  # lanes that share no atom
        # hand-over separates lanes, not tasks
        (two_lanes((), (0,), handover=3), TaskSchedule(modes=(1, 1), starts=(0, 10), makespan=20)),
        # what is given back at an instant can be taken at it
        (without_lanes((), (), ()), TaskSchedule(modes=(0, 1, 0), starts=(0, 0, 4), makespan=9)),
    ],
)
def test_a_schedule_that_keeps_the_constraints_is_valid(problem: Problem, schedule: TaskSchedule) -> None:
    """Also where it just does."""
    assert problem.is_valid(schedule)
    assert not problem.capacities or problem.peak(schedule, 0) == 4


@pytest.mark.parametrize(
    ("problem", "schedule", "family"),
    [
        (two_lanes((), ()), TaskSchedule(modes=(1, 1), starts=(0, 5), makespan=15), "(3)"),
        (two_lanes((), ()), TaskSchedule(modes=(1, 1), starts=(5, 5), makespan=15), "(3)"),
        (two_lanes((), ()), TaskSchedule(modes=(0, 2), starts=(0, 5), makespan=15), "(3)"),
        (two_lanes((), (), ()), TaskSchedule(modes=(1, 2, 0), starts=(0, 0, 9), makespan=15), "(3)"),
        (two_lanes((), (0,)), TaskSchedule(modes=(1, 2), starts=(0, 9), makespan=19), "(2)"),
        (two_lanes((), (0,), handover=3), TaskSchedule(modes=(1, 2), starts=(0, 12), makespan=22), "(2)"),
        (two_lanes((), (), handover=3), TaskSchedule(modes=(1, 0), starts=(0, 12), makespan=18), "(3)"),
        (two_lanes(()), TaskSchedule(modes=(1,), starts=(0,), makespan=9), "(5)"),
        (two_lanes(()), TaskSchedule(modes=(3,), starts=(0,), makespan=0), "(1)"),
        (two_lanes(()), TaskSchedule(modes=(0,), starts=(-1,), makespan=5), "task 0 starts at -1"),
        (two_lanes(()), TaskSchedule(modes=(0, 0), starts=(0, 6), makespan=12), "schedule has 2 modes"),
        (without_lanes((), ()), TaskSchedule(modes=(0, 0), starts=(0, 3), makespan=7), "(4)"),
    ],
)
def test_a_schedule_that_breaks_a_constraint_is_not_valid(
    problem: Problem, schedule: TaskSchedule, family: str
) -> None:
    """The violation names the constraint family of the docstring."""
    assert not problem.is_valid(schedule)
    assert any(violation.startswith(family) for violation in problem.violations(schedule))


@pytest.mark.parametrize(("last_start", "peak"), [(9, 7), (10, 3)])
def test_what_a_task_holds_stays_until_its_last_reader_has_ended(last_start: int, peak: int) -> None:
    """Also while neither runs."""
    holds = (ResourceHold(resource=0, amount=4, task=0, readers=(1,)),)
    problem = Problem(tasks=(a_task(4), a_task(4), a_task(1, demands=(3,))), capacities=(5,), holds=holds)
    schedule = TaskSchedule(modes=(0, 0, 0), starts=(0, 6, last_start), makespan=max(10, last_start + 1))
    assert problem.peak(schedule, 0) == max(4, peak)
    assert problem.is_valid(schedule) == (peak <= 5)


def test_slowdown_is_bilinear_in_the_memory_shares() -> None:
    """Its corners are the four numbers."""
    interference = Interference(slowdown=((1.0, 1.2), (1.1, 2.0)))
    assert [interference.factor(a, b) for a in (0, 1) for b in (0, 1)] == pytest.approx([1.0, 1.2, 1.1, 2.0])
    assert interference.factor(0.5, 0.5) == pytest.approx((1.0 + 1.2 + 1.1 + 2.0) / 4)
