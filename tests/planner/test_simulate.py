from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apollo_compile.planner.problem import Interference, Problem, ResourceHold, Task, TaskSchedule
from apollo_compile.planner.simulate import Execution, Simulator, execute, serial_schedule
from tests.builders import a_task, interfering, limited, on_halves, random_problem


def random_modes(rng: random.Random, problem: Problem) -> list[int]:
    """Return any mode for every task."""
    return [rng.randrange(len(task.modes)) for task in problem.tasks]


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_is_valid_and_no_task_can_start_earlier(seed: int) -> None:
    """Semi-active: every start is 0 or equals something it waits for; without interference it is executed so."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(1, 15), rng.choice((2, 4)))
    schedule = Simulator(problem).replay(range(len(problem.tasks)), random_modes(rng, problem))
    assert problem.violations(schedule) == ()
    for task, start in enumerate(schedule.starts):
        causes = {end + gap for end in problem.ends(schedule) for gap in (0, problem.handover)}
        assert start == 0 or start in causes, task
    expected = Execution(starts=schedule.starts, ends=tuple(problem.ends(schedule)), makespan=schedule.makespan)
    assert execute(problem, schedule) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_stops_exactly_the_replays_that_exceed_it(seed: int) -> None:
    """A replay at its own makespan passes, one below does not."""
    rng = random.Random(seed)
    problem = random_problem(rng, 10, 2)
    simulator, modes = Simulator(problem), random_modes(rng, problem)
    schedule = simulator.replay(range(10), modes)
    partial = simulator.begin()
    assert simulator.extend(partial, range(10), modes, schedule.makespan)
    assert partial.starts == list(schedule.starts)
    assert not simulator.extend(simulator.begin(), range(10), modes, schedule.makespan - 1)


def test_the_serial_schedule_is_the_sum_of_all_reference_modes() -> None:
    """No hand-over, no gap; also where there are no lanes to keep tasks apart."""
    problem = random_problem(random.Random(1), 12, 4)
    bare = Problem(tasks=tuple(Task(modes=task.modes[:1], predecessors=()) for task in problem.tasks))
    for one in (problem, bare):
        schedule = serial_schedule(one)
        assert schedule.makespan == sum(task.modes[0].duration for task in one.tasks)
        assert set(schedule.modes) == {0}
        assert one.violations(schedule) == ()


@pytest.mark.parametrize("seed", range(30))
def test_an_execution_keeps_order_and_gaps_and_never_runs_a_task_faster(seed: int) -> None:
    """It is a valid schedule of the tasks with the durations that they turned out to have."""
    rng = random.Random(seed)
    problem = interfering(random_problem(rng, rng.randrange(1, 20), rng.choice((2, 4))))
    schedule = Simulator(problem).replay(range(len(problem.tasks)), random_modes(rng, problem))
    execution = execute(problem, schedule)
    assert execution == execute(problem, schedule)
    assert _as_executed(problem, schedule, execution) == ()
    for number, (start, end) in enumerate(zip(execution.starts, execution.ends, strict=True)):
        assert end - start >= problem.mode(schedule, number).duration
    for atom in range(len(problem.atom_sizes)):
        users = [t for t in range(len(problem.tasks)) if atom in problem.lanes[problem.mode(schedule, t).lane]]
        assert sorted(users, key=schedule.starts.__getitem__) == sorted(users, key=execution.starts.__getitem__)


def _as_executed(problem: Problem, schedule: TaskSchedule, execution: Execution) -> tuple[str, ...]:
    """Return what an execution breaks if the chosen modes take as long as they did."""
    tasks = []
    for number, (start, end) in enumerate(zip(execution.starts, execution.ends, strict=True)):
        mode = replace(problem.mode(schedule, number), duration=end - start)
        tasks.append(replace(problem.tasks[number], modes=(replace(mode, lane=0), mode)))
    executed = TaskSchedule(modes=(1,) * len(tasks), starts=execution.starts, makespan=execution.makespan)
    return replace(problem, tasks=tuple(tasks)).violations(executed)


@pytest.mark.parametrize("seed", range(40))
def test_an_execution_needs_no_more_of_any_resource_than_the_limits(seed: int) -> None:
    """Although tasks take longer, and the values that they hold live longer."""
    rng = random.Random(seed)
    problem = interfering(limited(rng, random_problem(rng, 7, 2)), 3.0)
    schedule = Simulator(problem).replay(range(7), random_modes(rng, problem))
    # exactly what this schedule needs
    problem = replace(problem, capacities=(problem.peak(schedule, 0),))
    assert problem.violations(schedule) == ()
    assert _as_executed(problem, schedule, execute(problem, schedule)) == ()


def side_by_side(*durations: int, share: float, sizes: tuple[int, ...]) -> tuple[Problem, TaskSchedule]:
    """Return one task per atom, all at once, that wait for memory for a share of the time; two that do: x 2."""
    tasks = tuple(a_task(*(len(durations) + 1) * [duration], memory_share=share) for duration in durations)
    problem = Problem(
        tasks=tasks,
        lanes=(frozenset(range(len(sizes))), *(frozenset({atom}) for atom in range(len(sizes)))),
        atom_sizes=sizes,
        interference=Interference(slowdown=((1.0, 1.0), (1.0, 2.0))),
    )
    return problem, Simulator(problem).replay(range(len(tasks)), range(1, len(tasks) + 1))


@pytest.mark.parametrize(
    ("durations", "sizes", "share", "ends"),
    [
        ((100, 100), (1, 1), 1.0, (200, 200)),
        ((100, 100), (1, 1), 0.0, (100, 100)),
        ((100, 100), (1, 1), 0.5, (125, 125)),
        ((100, 50), (1, 1), 1.0, (150, 100)),
        ((100, 100, 100), (1, 1, 2), 1.0, (200, 200, 200)),
        ((100, 100, 10), (1, 1, 2), 1.0, (140, 140, 20)),  # 20 at half speed; then 90 at 1 / (1 + 1/3)
    ],
)
def test_neighbours_slow_each_other_while_they_run(
    durations: tuple[int, ...], sizes: tuple[int, ...], share: float, ends: tuple[int, ...]
) -> None:
    """At half speed until the first has ended; half a share each is a quarter of the way to the corner.

    On 1, 1 and 2 units each sees the others in proportion, so with both at work the factor is 2 for everyone.
    """
    assert execute(*side_by_side(*durations, share=share, sizes=sizes)).ends == ends


def test_a_chain_behind_a_slowed_task_starts_later() -> None:
    """With the hand-over in between."""
    tasks = (a_task(100, 100, 100, before=before, memory_share=1.0) for before in ((), (), (1,)))
    problem = on_halves(tasks, handover=7, interference=Interference(slowdown=((1.0, 1.0), (1.0, 1.5))))
    schedule = Simulator(problem).replay(range(3), [1, 2, 1])
    assert schedule.starts == (0, 0, 107)
    assert execute(problem, schedule) == Execution(starts=(0, 0, 157), ends=(150, 150, 257), makespan=257)


def test_a_task_that_waited_for_memory_still_waits_for_it() -> None:
    """The third task fits only after the reader of the first has ended."""
    kinds = (((), 0), ((0,), 0), ((), 6))
    tasks = (a_task(10, 10, 10, before=before, demands=(demand,), memory_share=1.0) for before, demand in kinds)
    problem = on_halves(tasks, capacities=(10,), holds=(ResourceHold(resource=0, amount=5, task=0, readers=(1,)),))
    schedule = TaskSchedule(modes=(1, 1, 2), starts=(0, 10, 20), makespan=30)
    assert problem.violations(schedule) == ()
    assert execute(problem, schedule).starts == (0, 10, 20)
