"""Timing of a decision: replay an order and a choice of lanes.

    Simulator(problem).replay(order, lanes) -> Schedule

Tasks are appended one after the other, each as early as its predecessors, its atoms and the hand-overs allow. The
result is semi-active: no task can start earlier without changing the order on an atom. Some order and choice of lanes
replays to an optimal schedule, so searching over those two loses nothing.
Source: Sprecher, Kolisch, Drexl, "Semi-active, active, and non-delay schedules", EJOR 80, 1995,
https://doi.org/10.1016/0377-2217(93)E0294-8
"""

from __future__ import annotations

from collections.abc import Sequence

from apollo_compile.planner.problem import Problem, Schedule


class Simulator:
    """The numbers of one problem in the shape that replaying needs; holds no state between replays."""

    def __init__(self, problem: Problem) -> None:
        num_lanes = len(problem.lanes)
        self.durations: list[list[int | None]] = []
        """Per task and lane; None where the task has no mode."""
        for task in problem.tasks:
            row: list[int | None] = [None] * num_lanes
            for mode in task.modes:
                row[mode.lane] = mode.duration
            self.durations.append(row)
        self.predecessors = [tuple(dict.fromkeys(task.predecessors)) for task in problem.tasks]
        self.successors = problem.successors()
        self.atoms = [tuple(sorted(lane)) for lane in problem.lanes]
        self.num_atoms = len(problem.atom_sizes)
        self.handover = problem.handover
        self.tails = tail_lengths(
            self.successors, [min(mode.duration for mode in task.modes) for task in problem.tasks]
        )
        """Least time from the end of a task to the end of all."""
        self.lane_tails = [
            tail_lengths(self.successors, [row[lane] or row[0] or 0 for row in self.durations])
            for lane in range(num_lanes)
        ]
        """The same if all ran on one lane, per lane and task; a task without a mode there counts as on lane 0."""

    def replay(self, order: Sequence[int], lanes: Sequence[int]) -> Schedule:
        """Return the semi-active schedule; `order` is topological and every task has a mode on its lane."""
        starts = self.starts(order, lanes)
        assert starts is not None  # only a limit ends a replay early
        return Schedule(lanes=tuple(lanes), starts=tuple(starts), makespan=self.makespan(starts, lanes))

    def makespan(self, starts: Sequence[int], lanes: Sequence[int]) -> int:
        """Return when the last task ends."""
        return max((start + (self.durations[t][lanes[t]] or 0) for t, start in enumerate(starts)), default=0)

    def starts(self, order: Sequence[int], lanes: Sequence[int], limit: int | None = None) -> list[int] | None:
        """Return the start of every task; None as soon as it is certain that the makespan exceeds `limit`."""
        durations, predecessors, atoms, tails, handover = (
            self.durations,
            self.predecessors,
            self.atoms,
            self.tails,
            self.handover,
        )
        starts = [0] * len(durations)
        ends = [0] * len(durations)
        free = [-handover] * self.num_atoms
        user = [-1] * self.num_atoms
        for task in order:
            lane = lanes[task]
            start = 0
            for predecessor in predecessors[task]:
                ready = ends[predecessor]
                if lanes[predecessor] != lane:
                    ready += handover
                if ready > start:
                    start = ready
            lane_atoms = atoms[lane]
            for atom in lane_atoms:
                ready = free[atom]
                if user[atom] != lane:
                    ready += handover
                if ready > start:
                    start = ready
            end = start + durations[task][lane]  # type: ignore[operator]  # the caller chose a mode that exists
            if limit is not None and end + tails[task] > limit:
                return None
            starts[task] = start
            ends[task] = end
            for atom in lane_atoms:
                free[atom] = end
                user[atom] = lane
        return starts


def serial_schedule(problem: Problem) -> Schedule:
    """Return the schedule that runs every task on lane 0 in the given order."""
    return Simulator(problem).replay(range(len(problem.tasks)), [0] * len(problem.tasks))


def tail_lengths(successors: Sequence[Sequence[int]], durations: Sequence[float]) -> list[int]:
    """Return, per task, the longest chain of durations behind it, its own excluded."""
    tails = [0.0] * len(durations)
    for task in reversed(range(len(durations))):
        tails[task] = max((durations[after] + tails[after] for after in successors[task]), default=0)
    return [int(tail) for tail in tails]
