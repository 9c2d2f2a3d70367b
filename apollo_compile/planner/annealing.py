"""Improve a schedule by simulated annealing over order and modes.

    anneal(problem, start, seed=..., iterations=..., deadline=...) -> Annealed

A step makes one of three moves
    window   assign the tasks of a window of the order to the lanes of one split, by chain or by current lane
    run      assign a run of consecutive tasks of one chain to one lane, and maybe move it early or late in the order
    single   give one task any of its modes, and any place between its predecessors and successors
and replays from the first changed position. A schedule is accepted if it is not longer than

    current makespan - temperature * ln(u),    u uniform in (0, 1]

so a replay stops as soon as a chain, or the remaining load of an atom, exceeds that limit. The temperature falls
geometrically, from a share of the makespan that is larger for few tasks, where every change is large and the same
effort makes more moves per task. Orders are kept sorted by start, so the tasks of a window are close in time. A
schedule that exceeds a resource is rejected.

Moves come from a seeded generator and their number from the caller, so the result is reproducible unless the deadline
ends the walk early.

Guarantees: the schedule is valid, and not longer than `start`, which must be valid.
Source: Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220, 1983,
https://doi.org/10.1126/science.220.4598.671; Bouleimen, Lecocq, "A new efficient simulated annealing algorithm for the
RCPSP and its multiple mode version", EJOR 149, 2003, https://doi.org/10.1016/S0377-2217(02)00761-0
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from apollo_compile.planner.greedy import splits
from apollo_compile.planner.problem import MAKESPAN, Problem, TaskSchedule
from apollo_compile.planner.simulate import Partial, Simulator

HOTTEST = 0.3
HEAT = 20.0
"""Temperature at the start: min(HOTTEST, HEAT / tasks^2), as a share of the makespan."""
COLDEST = 1e-4
COOLING = 20.0
"""Temperature at the end: min(COLDEST, temperature at the start / COOLING), as a share of the makespan."""
WINDOW_MOVES, RUN_MOVES = 0.7, 0.2
"""Shares of the moves; the rest are moves of single tasks."""
STEPS_PER_DEADLINE = 64
"""Steps between two checks of the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Annealed:
    """Result of a walk."""

    schedule: TaskSchedule
    """The shortest schedule of the walk."""
    reached_deadline: bool


def anneal(problem: Problem, start: TaskSchedule, *, seed: int, iterations: int, deadline: float) -> Annealed:
    """Return the best schedule within `iterations` moves.

    Arguments:
        problem: the problem, with lanes or without.
        start: a valid schedule, from which the walk starts.
        seed: seed of the moves.
        iterations: number of moves.
        deadline: value of `time.monotonic` at which the walk ends early; may be infinite.
    """
    if not problem.tasks:
        return Annealed(schedule=start, reached_deadline=False)
    rng = random.Random(seed)
    walk = _Walk(problem, start)
    moves = _Moves(problem, walk.simulator, rng)
    best = min(start, walk.schedule, key=MAKESPAN)
    first = min(HOTTEST, HEAT / len(problem.tasks) ** 2)
    last = min(COLDEST, first / COOLING)
    for step in range(iterations):
        if step % STEPS_PER_DEADLINE == 0 and time.monotonic() > deadline:
            return Annealed(schedule=best, reached_deadline=True)
        temperature = best.makespan * first * (last / first) ** (step / iterations)
        limit = walk.schedule.makespan - temperature * math.log(1 - rng.random())
        change = moves.draw(walk)
        if change is not None and walk.accept(change, limit):
            best = min(best, walk.schedule, key=MAKESPAN)
    return Annealed(schedule=best, reached_deadline=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """New tasks for the positions `first` to `last` - 1 of an order, and the modes of all tasks."""

    first: int
    last: int
    part: list[int]
    modes: list[int]
    """Modes of all tasks; only those of tasks in `part` may differ from the current ones."""


class _Walk:
    """The current schedule, with the state at every position of its order to replay from there."""

    def __init__(self, problem: Problem, start: TaskSchedule) -> None:
        num_tasks = len(problem.tasks)
        self.simulator = Simulator(problem)
        self.schedule = start
        self.order = sorted(range(num_tasks), key=lambda task: (start.starts[task], task))
        """Tasks by start, so that neighbours in the order are close in time."""
        self.modes = list(start.modes)
        self.position = [0] * num_tasks
        """Per task, its position in the order."""
        self._now = self.simulator.begin()
        self._before = [(self._now.free, self._now.user)] * (num_tasks + 1)
        """Per position: `free` and `user` of the atoms before its task is appended."""
        self._left = [[0] * self.simulator.num_atoms] * (num_tasks + 1)
        """Per position: the remaining load on every atom."""
        everything = _Change(first=0, last=num_tasks, part=self.order, modes=self.modes)
        partial = self._replay(everything, math.inf)
        assert partial is not None  # the limit is infinite
        # where tasks wait for resources in `start`, this replay differs and may exceed them; `schedule` is valid
        self._adopt(everything, partial)

    def accept(self, change: _Change, limit: float) -> bool:
        """Make a change and return True, unless the makespan exceeds the limit or the schedule exceeds a resource."""
        partial = self._replay(change, limit)
        if partial is None:
            return False
        schedule = TaskSchedule(modes=tuple(change.modes), starts=tuple(partial.starts), makespan=max(partial.ends))
        if any(self.simulator.problem.resource_violations(schedule)):
            return False
        self._adopt(change, partial)
        self.schedule = schedule
        return True

    def after_predecessors(self, task: int) -> int:
        """Return the first position in the order that the task may have."""
        return max([self.position[other] + 1 for other in self.simulator.predecessors[task]], default=0)

    def before_successors(self, task: int) -> int:
        """Return the end of the range of positions that the task may have, exclusive."""
        return min([self.position[other] for other in self.simulator.successors[task]], default=len(self.order))

    def _replay(self, change: _Change, limit: float) -> Partial | None:
        """Return the current schedule with the change; None if its makespan exceeds the limit."""
        now, (free, user) = self._now, self._before[change.first]
        partial = Partial(
            starts=now.starts.copy(), ends=now.ends.copy(), lanes=now.lanes.copy(), free=free.copy(), user=user.copy()
        )
        if not self.simulator.extend(partial, change.part, change.modes, limit):
            return None
        for free_at, left in zip(partial.free, self._left[change.last], strict=True):
            if free_at + left > limit:
                return None
        fits = self.simulator.extend(partial, self.order[change.last :], change.modes, limit)
        return partial if fits else None

    def _adopt(self, change: _Change, partial: Partial) -> None:
        """Make a change, and update the state of every position."""
        choices, modes = self.simulator.choices, change.modes
        rest = [*change.part, *self.order[change.last :]]
        rest.sort(key=partial.starts.__getitem__)
        free, user = self._before[change.first]
        free, user = free.copy(), user.copy()
        for place, task in enumerate(rest, start=change.first):
            self._before[place] = (free.copy(), user.copy())
            self.position[task] = place
            lane, atoms, _ = choices[task][modes[task]]
            for atom in atoms:
                free[atom], user[atom] = partial.ends[task], lane
        self.order = self.order[: change.first] + rest
        self.modes, self._now = modes, partial
        left = [0] * len(free)
        for place in reversed(range(len(self.order))):
            task = self.order[place]
            _, atoms, duration = choices[task][modes[task]]
            left = left.copy()
            for atom in atoms:
                left[atom] += duration
            self._left[place] = left


class _Moves:
    """Draws changes for `_Walk.accept`."""

    def __init__(self, problem: Problem, simulator: Simulator, rng: random.Random) -> None:
        self.rng = rng
        self.simulator = simulator
        self.num_lanes = len(problem.lanes)
        self.num_modes = [len(task.modes) for task in problem.tasks]
        self.next_in_chain = [max(after, key=simulator.tails.__getitem__, default=-1) for after in simulator.successors]
        """Per task, the successor with the longest chain after it; -1 if it has no successor."""
        self.chain_of: list[int] = []
        """Per task, the first task of its chain; a chain continues from a task to its `next_in_chain`."""
        for task, before in enumerate(simulator.predecessors):
            self.chain_of.append(next((self.chain_of[p] for p in before if self.next_in_chain[p] == task), task))
        self.splits = splits(problem)

    def draw(self, walk: _Walk) -> _Change | None:
        """Return a random change; None if it equals the current schedule."""
        kind = self.rng.random()
        if kind < WINDOW_MOVES and self.splits:
            return self._window(walk)
        return self._run(walk) if kind < WINDOW_MOVES + RUN_MOVES else self._single(walk)

    def _single(self, walk: _Walk) -> _Change | None:
        task = self.rng.randrange(len(self.num_modes))
        modes = walk.modes.copy()
        modes[task] = self.rng.randrange(self.num_modes[task])
        present = place = walk.position[task]
        if self.rng.random() < 0.7:
            place = self.rng.randrange(walk.after_predecessors(task), walk.before_successors(task))
        if modes == walk.modes and place == present:
            return None
        first, last = min(place, present), max(place, present) + 1
        part = walk.order[first:last]
        part.remove(task)
        part.insert(place - first, task)
        return _Change(first=first, last=last, part=part, modes=modes)

    def _length(self) -> int:
        """Return a random number of tasks, uniform in its logarithm."""
        num_tasks = len(self.num_modes)
        return min(num_tasks, round(2 ** (self.rng.random() * num_tasks.bit_length())))

    def _window(self, walk: _Walk) -> _Change | None:
        first = self.rng.randrange(len(walk.order))
        part = walk.order[first : first + self._length()]
        split = self.rng.choice(self.splits)
        by_chain = self.rng.random() < 0.5
        offset = self.rng.randrange(len(split))
        modes = walk.modes.copy()
        lane_by_key: dict[int, int] = {}
        for task in part:
            present = self.simulator.choices[task][modes[task]][0]
            if by_chain or present:  # by lane, tasks on lane 0 stay there
                key = self.chain_of[task] if by_chain else present
                lane = lane_by_key.setdefault(key, split[(offset + len(lane_by_key)) % len(split)])
                modes[task] = self._mode_on(lane, task, modes[task])
        if modes == walk.modes:
            return None
        return _Change(first=first, last=first + len(part), part=part, modes=modes)

    def _run(self, walk: _Walk) -> _Change | None:
        """Assign a run of one chain to one lane and maybe move it; a run that keeps its lanes is always moved."""
        run = self._draw_run()
        keeps_lane = self.rng.random() < 0.25
        where = self.rng.randrange(1 if keeps_lane else 0, 3)
        modes = walk.modes.copy()
        if not keeps_lane:
            lane = self.rng.randrange(self.num_lanes)
            for task in run:
                modes[task] = self._mode_on(lane, task, modes[task])
        first, last = walk.position[run[0]], walk.position[run[-1]] + 1
        part = walk.order[first:last]
        if where == 1:
            first = walk.after_predecessors(run[0])
            part = _move_run(walk.order[first:last], run, self.simulator.predecessors)
        elif where == 2:
            last = walk.before_successors(run[-1])
            part = _move_run(walk.order[first:last][::-1], run[::-1], self.simulator.successors)[::-1]
        if modes == walk.modes and part == walk.order[first:last]:
            return None
        return _Change(first=first, last=last, part=part, modes=modes)

    def _draw_run(self) -> list[int]:
        task = self.rng.randrange(len(self.num_modes))
        run = []
        for _ in range(self._length()):
            run.append(task)
            task = self.next_in_chain[task]
            if task < 0:
                break
        return run

    def _mode_on(self, lane: int, task: int, present: int) -> int:
        """Return the fastest mode on the lane; `present` if the task is on the lane already or has no mode there."""
        if self.simulator.choices[task][present][0] == lane:
            return present
        return self.simulator.mode_by_lane[task].get(lane, present)


def _move_run(part: Sequence[int], run: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[int]:
    """Return a part of an order with the tasks of the run as early as their `neighbours` in it allow."""
    members = set(run)
    others = {task for task in part if task not in members}
    missing = {task: sum(other in others for other in neighbours[task]) for task in run}
    watchers: dict[int, list[int]] = {}
    for task in run:
        for other in neighbours[task]:
            if other in others:
                watchers.setdefault(other, []).append(task)
    placed: list[int] = []
    head = 0
    while head < len(run) and not missing[run[head]]:
        placed.append(run[head])
        head += 1
    for task in part:
        if task not in members:
            placed.append(task)
            for waiting in watchers.get(task, ()):
                missing[waiting] -= 1
            while head < len(run) and not missing[run[head]]:
                placed.append(run[head])
                head += 1
    return placed
