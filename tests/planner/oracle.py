"""The exhaustive search that greedy schedules and bounds are compared with."""

from __future__ import annotations

from apollo_compile.planner.problem import Problem


def find_optimum(problem: Problem) -> int:
    """Return the least makespan: every order, every lane, depth first, skipping only what is already too long."""
    num_tasks = len(problem.tasks)
    best = sum(problem.duration(task, 0) or 0 for task in range(num_tasks)) + 1

    def extend(lanes: dict[int, int], ends: dict[int, int], last: dict[int, int]) -> None:
        """Append every task that is ready on every lane; `last` is the latest task of every atom."""
        nonlocal best
        makespan = max(ends.values(), default=0)
        if makespan >= best:
            return
        if len(lanes) == num_tasks:
            best = makespan
            return
        for task in range(num_tasks):
            if task in lanes or any(other not in lanes for other in problem.tasks[task].predecessors):
                continue
            for mode in problem.tasks[task].modes:
                before = {*problem.tasks[task].predecessors}
                before |= {last[atom] for atom in problem.lanes[mode.lane] if atom in last}
                ready = [ends[other] + (problem.handover if lanes[other] != mode.lane else 0) for other in before]
                end = max(ready, default=0) + mode.duration
                after = last | dict.fromkeys(problem.lanes[mode.lane], task)
                extend(lanes | {task: mode.lane}, ends | {task: end}, after)

    extend({}, {}, {})
    return best
