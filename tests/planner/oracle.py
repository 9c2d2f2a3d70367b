"""The exhaustive search that schedules and bounds are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable

from apollo_compile.planner.problem import ExecutionMode, Problem, ResourceHold, Task
from tests.builders import limited, random_problem


def find_optimum(problem: Problem, *, below: int | None = None) -> int | None:
    """Return the least makespan; None if there is no schedule, or none shorter than `below`.

    Every order of starts and every mode, depth first. The next task starts as soon as everything allows it, but not
    before the last one: with the others starting later, an earlier start only gives resources back earlier.
    """
    num_tasks = len(problem.tasks)
    shortest = [min(mode.duration for mode in task.modes) for task in problem.tasks]
    tails = [0] * num_tasks
    for task in reversed(range(num_tasks)):
        for other in problem.tasks[task].predecessors:
            tails[other] = max(tails[other], shortest[task] + tails[task])
    best = below
    chosen: dict[int, ExecutionMode] = {}
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}

    def in_use(resource: int, instant: int) -> int:
        running = [task for task in chosen if ends[task] > instant and chosen[task].demands]
        held = [
            hold.amount
            for hold in problem.holds
            if hold.resource == resource
            and hold.task in chosen
            and any(task not in ends or ends[task] > instant for task in (hold.task, *hold.readers))
        ]
        return sum(chosen[task].demands[resource] for task in running) + sum(held)

    def fits(task: int, mode: ExecutionMode, instant: int) -> bool:
        for resource, capacity in enumerate(problem.capacities):
            own = sum(hold.amount for hold in problem.holds if (hold.resource, hold.task) == (resource, task))
            own += mode.demands[resource] if mode.demands else 0
            if in_use(resource, instant) + own > capacity:
                return False
        return True

    def find_start(task: int, mode: ExecutionMode) -> int | None:
        atoms = problem.lanes[mode.lane]
        before = [
            other
            for other in chosen
            if other in problem.tasks[task].predecessors or atoms & problem.lanes[chosen[other].lane]
        ]
        ready = [ends[other] + (problem.handover if chosen[other].lane != mode.lane else 0) for other in before]
        earliest = max([0, *starts.values(), *ready])
        instants = [earliest, *sorted(end for end in ends.values() if end > earliest)]
        return next((instant for instant in instants if fits(task, mode, instant)), None)

    def extend() -> None:
        nonlocal best
        if not num_tasks or not chosen.keys() ^ set(range(num_tasks)):
            best = max(ends.values(), default=0)
            return
        for task in range(num_tasks):
            if task in chosen or any(other not in chosen for other in problem.tasks[task].predecessors):
                continue
            for mode in problem.tasks[task].modes:
                start = find_start(task, mode)
                if start is None or (best is not None and start + mode.duration + tails[task] >= best):
                    continue
                chosen[task], starts[task], ends[task] = mode, start, start + mode.duration
                extend()
                del chosen[task], starts[task], ends[task]

    extend()
    return best if best != below else None


def ratios_to_optimum(num_tasks: int, num_units: int, makespan: Callable[[Problem, int], int]) -> list[float]:
    """Return what a planner finds for small random problems and their seeds over the optimum; print mean and worst."""
    ratios = []
    for seed in range(25):
        problem = random_problem(random.Random(seed), num_tasks, num_units)
        ratios.append(makespan(problem, seed) / (find_optimum(problem) or 0))
    print(f"over the optimum: mean {sum(ratios) / len(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    return ratios


def random_without_lanes(rng: random.Random, num_tasks: int) -> tuple[Task, ...]:
    """Return tasks with several modes that share two renewable resources."""
    tasks = []
    for task in range(num_tasks):
        modes = tuple(
            ExecutionMode(duration=rng.randrange(1, 9), demands=(rng.randrange(5), rng.randrange(4)))
            for _ in range(rng.randrange(1, 4))
        )
        before = sorted(rng.sample(range(task), min(task, rng.randrange(3))))
        tasks.append(Task(modes=modes, predecessors=tuple(before)))
    return tuple(tasks)


SMALL: dict[str, Callable[[random.Random], Problem]] = {
    "two or four units": lambda rng: random_problem(rng, rng.randrange(1, 6), rng.choice((2, 4))),
    "four at once": lambda rng: random_problem(rng, 3, 16),
    "within limits": lambda rng: limited(rng, random_problem(rng, rng.randrange(1, 5), rng.choice((2, 4)))),
    "without lanes": lambda rng: Problem(
        tasks=random_without_lanes(rng, 4),
        capacities=(rng.randrange(3, 6), 4),
        holds=(ResourceHold(resource=0, amount=rng.randrange(3), task=1, readers=(2, 3)),),
    ),
}
"""Problems by kind for which exhaustive search takes moments; of those without lanes, some have no solution."""
