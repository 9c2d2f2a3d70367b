"""A good schedule in a fraction of a second: a portfolio of list schedules, then local improvement.

    greedy_schedule(problem, seed=..., iterations=...) -> Schedule

Portfolio. A list scheduler appends one ready task at a time. Each `_Rule` of the portfolio fixes
    which lanes      all, or those of one split (a narrow lane, the lanes beside it, and lane 0)
    which task next  the one that can start first, or the one of highest priority; priority = longest chain behind it,
                     with durations on lane 0, of the slowest mode, or of the mode with the least units x time
    which lane       least  end + greed * (units x time) / all units:  greed 0 is earliest finish, much is efficiency;
                     or: efficient while another task is ready, and when it is alone the lane on which the whole chain
                     behind it would end first, so that one hand-over is weighed against all that it wins
Hand-overs are part of every start, so staying on the lane of a predecessor wins where it pays; ties stay as well.

Improvement. From the best few schedules, repeat one of two moves: give a run of consecutive tasks of one chain a lane,
and move it early, late or nowhere in the order; or give a window of the order the lanes of a split, by chain or by
present lane. A schedule is accepted if it exceeds the best by no more than a slack, which shrinks to nothing: without
it, every tenth small problem ends far from its optimum. Moves come from a seeded generator, and their number depends on
the number of tasks, so the time is bounded and the result reproducible.

Guarantees: valid, and never longer than the serial schedule, which competes and wins ties.
Leaves to others: how far from optimal it is (`bounds.py`).
Sources: Kolisch, Hartmann, "Heuristic algorithms for the RCPSP", 1999, https://doi.org/10.1007/978-1-4615-5533-9_7
(rules); Dueck, "New optimization heuristics: the great deluge algorithm and the record-to-record travel", Journal of
Computational Physics 104, 1993, https://doi.org/10.1006/jcph.1993.1010 (acceptance)
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from apollo_compile.planner.problem import Problem, Schedule
from apollo_compile.planner.simulate import Simulator, serial_schedule, tail_lengths

NUM_STARTS = 3
"""Schedules of the portfolio from which improvement starts."""
REFERENCE_TASKS = 60
"""Number of tasks for which `iterations` is meant; fewer tasks get more steps and more tasks fewer."""
LEAST_SLACK = 0.02
TASK_SLACK = 1.2
"""Improvement begins among schedules up to max(LEAST_SLACK, TASK_SLACK / tasks) longer than the best."""
MAX_CANDIDATES = 8
"""Ready tasks that a list scheduler looks at, best priority first."""


_CHOICES = (
    (True, 1e6, True),
    (True, 4.0, True),
    (True, 1.0, True),
    (True, 1e6, False),
    (True, 0.0, False),
    (False, 2.0, True),
    (False, 0.0, False),
)
"""by_time, greed, chain_alone of the portfolio's rules."""


def greedy_schedule(problem: Problem, *, seed: int = 0, iterations: int = 4000) -> Schedule:
    """Return the best schedule found; `iterations` are the improvement steps for `REFERENCE_TASKS` tasks."""
    serial = serial_schedule(problem)
    if len(problem.tasks) < 2 or len(problem.lanes) < 2:
        return serial
    simulator = Simulator(problem)
    found = {(serial.lanes, serial.starts): serial}
    for rule in _portfolio(problem, simulator):
        schedule = _list_schedule(problem, simulator, rule)
        found.setdefault((schedule.lanes, schedule.starts), schedule)
    starts = sorted(found.values(), key=lambda schedule: schedule.makespan)[:NUM_STARTS]
    steps = min(5 * iterations, max(iterations // 4, iterations * REFERENCE_TASKS // len(problem.tasks)))
    best = serial
    for index, start in enumerate(starts):
        share = steps // 2 if index == 0 else steps // (2 * max(1, len(starts) - 1))
        improved = _improve(problem, simulator, start, random.Random(seed * NUM_STARTS + index), share)
        if improved.makespan < best.makespan:
            best = improved
    return best


# ------------------------------------------------------------------------------------------------- list schedules


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """How one list scheduler decides."""

    lanes: tuple[int, ...]
    priority: tuple[float, ...]
    """Per task; larger goes first."""
    by_time: bool
    """Whether the task that can start first goes first, whatever its priority."""
    greed: float
    """Weight of units x time against the end."""
    chain_alone: bool
    """Whether a task that is the only ready one chooses for the whole chain behind it, greed aside."""


def _portfolio(problem: Problem, simulator: Simulator) -> Iterator[_Rule]:
    def efficient(task: int) -> int:
        lane = min(
            (mode.lane for mode in problem.tasks[task].modes), key=lambda lane: _area(problem, simulator, task, lane)
        )
        return simulator.durations[task][lane] or 0

    wide = [simulator.durations[task][0] or 0 for task in range(len(problem.tasks))]
    slow = [max(mode.duration for mode in task.modes) for task in problem.tasks]
    frugal = [efficient(task) for task in range(len(problem.tasks))]
    priorities: dict[tuple[float, ...], None] = {}
    for durations in (wide, slow, frugal):
        tails = tail_lengths(simulator.successors, durations)
        priorities.setdefault(tuple(tail + duration for tail, duration in zip(tails, durations, strict=True)))
    for lanes in lane_families(problem):
        for priority in priorities:
            for by_time, greed, chain_alone in _CHOICES:
                yield _Rule(lanes=lanes, priority=priority, by_time=by_time, greed=greed, chain_alone=chain_alone)


def lane_families(problem: Problem) -> list[tuple[int, ...]]:
    """Return sets of lanes worth planning with: all, and lane 0 with each narrow lane and those beside it."""
    families: dict[tuple[int, ...], None] = {tuple(range(len(problem.lanes))): None}
    for lane in range(1, len(problem.lanes)):
        beside = [other for other in range(1, len(problem.lanes)) if not problem.lanes[other] & problem.lanes[lane]]
        families.setdefault(tuple(sorted({0, lane, *beside})))
    return list(families)


def _area(problem: Problem, simulator: Simulator, task: int, lane: int) -> int:
    """Return units x time."""
    return (simulator.durations[task][lane] or 0) * sum(problem.atom_sizes[atom] for atom in simulator.atoms[lane])


def _list_schedule(problem: Problem, simulator: Simulator, rule: _Rule) -> Schedule:
    num_tasks = len(problem.tasks)
    handover, atoms, durations = simulator.handover, simulator.atoms, simulator.durations
    total = sum(problem.atom_sizes)
    share = [sum(problem.atom_sizes[atom] for atom in lane_atoms) / total for lane_atoms in atoms]
    free = [-handover] * simulator.num_atoms
    user = [-1] * simulator.num_atoms
    waits_for = [len(predecessors) for predecessors in simulator.predecessors]
    ends, lanes, order = [0] * num_tasks, [0] * num_tasks, list[int]()
    ready: list[tuple[float, int]] = []
    """(-priority, task), ascending: best first."""
    from_predecessors: dict[int, list[tuple[int, int, int]]] = {}
    """Per ready task: (lane, earliest start as far as predecessors go, 0 if it is the lane of the last of them)."""

    def make_ready(task: int) -> None:
        predecessors = simulator.predecessors[task]
        main_lane = lanes[max(predecessors, key=lambda other: ends[other])] if predecessors else -1
        options = []
        for lane in rule.lanes:
            if durations[task][lane] is not None:
                start = max(
                    (ends[other] + (handover if lanes[other] != lane else 0) for other in predecessors), default=0
                )
                options.append((lane, start, int(lane != main_lane)))
        from_predecessors[task] = options
        bisect.insort(ready, (-rule.priority[task], task))

    def best_option(task: int, alone: bool) -> tuple[int, int]:
        """Return (start, lane) of the lane that the rule likes best."""
        best: tuple[float, int, int] | None = None
        choice = (0, 0)
        for lane, start, moves in from_predecessors[task]:
            for atom in atoms[lane]:
                free_at = free[atom] if user[atom] == lane else free[atom] + handover
                if free_at > start:
                    start = free_at
            duration = durations[task][lane] or 0
            if alone:
                key = (float(start + duration + simulator.lane_tails[lane][task]), moves, start)
            else:
                key = (start + duration + rule.greed * share[lane] * duration, moves, start)
            if best is None or key < best:
                best, choice = key, (start, lane)
        return choice

    for task in range(num_tasks):
        if not waits_for[task]:
            make_ready(task)
    while ready:
        alone = rule.chain_alone and len(ready) == 1
        candidates = [task for _, task in ready[: MAX_CANDIDATES if rule.by_time else 1]]
        options = [(best_option(task, alone), rank, task) for rank, task in enumerate(candidates)]
        (start, lane), _, task = min(options, key=lambda option: (option[0][0], option[1]))
        del ready[bisect.bisect_left(ready, (-rule.priority[task], task))]
        order.append(task)
        lanes[task] = lane
        ends[task] = start + (durations[task][lane] or 0)
        for atom in atoms[lane]:
            free[atom], user[atom] = ends[task], lane
        for after in simulator.successors[task]:
            waits_for[after] -= 1
            if not waits_for[after]:
                make_ready(after)
    return simulator.replay(order, lanes)


# --------------------------------------------------------------------------------------------------- improvement


def _improve(problem: Problem, simulator: Simulator, start: Schedule, rng: random.Random, steps: int) -> Schedule:
    """Return a schedule that is not longer than `start`."""
    num_tasks = len(problem.tasks)
    next_in_chain, chain_of = _chains(simulator)
    splits = [tuple(lane for lane in family if lane) for family in lane_families(problem)[1:]]
    starts, lanes, makespan = list(start.starts), list(start.lanes), start.makespan
    order = sorted(range(num_tasks), key=lambda task: (starts[task], task))
    best = (makespan, order, lanes)
    slack = max(LEAST_SLACK, TASK_SLACK / num_tasks)
    for step in range(steps):
        new_lanes = lanes.copy()
        kind = rng.random()
        if kind < 0.6 or not splits:
            run = _random_run(next_in_chain, rng)
            lane = rng.randrange(len(problem.lanes))
            changed = kind < 0.15 or _give_lane(simulator, new_lanes, run, lane)
            place = rng.randrange(3) if kind >= 0.15 else rng.randrange(1, 3)
            new_order = order if place == 0 else _move_run(simulator, order, run, early=place == 1)
            changed = changed or new_order != order
        else:
            first = rng.randrange(num_tasks)
            window = order[first : first + _random_length(num_tasks, rng)]
            by_lane = [lane if lane else -1 for lane in lanes]
            keys = chain_of if rng.random() < 0.5 else by_lane
            changed = _change_split(simulator, new_lanes, window, splits[rng.randrange(len(splits))], keys, rng)
            new_order = order
        if changed:
            limit = round(best[0] * (1 + slack * (1 - step / steps)))
            new_starts = simulator.starts(new_order, new_lanes, limit)
            if new_starts is not None:
                starts, lanes = new_starts, new_lanes
                makespan = simulator.makespan(starts, lanes)
                order = sorted(new_order, key=starts.__getitem__)
                if makespan < best[0]:
                    best = (makespan, order, lanes)
    return simulator.replay(best[1], best[2])


def _chains(simulator: Simulator) -> tuple[list[int], list[int]]:
    """Return, per task, the successor with the longest chain behind it (-1 where there is none), and its chain.

    A task is of the chain of its first predecessor that names it as that successor; otherwise it begins a chain.
    """
    next_in_chain = [max(after, key=simulator.tails.__getitem__, default=-1) for after in simulator.successors]
    chain_of: list[int] = []
    for task, predecessors in enumerate(simulator.predecessors):
        chain_of.append(next((chain_of[other] for other in predecessors if next_in_chain[other] == task), task))
    return next_in_chain, chain_of


def _random_length(num_tasks: int, rng: random.Random) -> int:
    """Return a run length, short ones as likely as long ones: a power of two, jittered."""
    return min(num_tasks, round(2 ** (rng.random() * num_tasks.bit_length())))


def _random_run(next_in_chain: Sequence[int], rng: random.Random) -> list[int]:
    task = rng.randrange(len(next_in_chain))
    run: list[int] = []
    for _ in range(_random_length(len(next_in_chain), rng)):
        run.append(task)
        task = next_in_chain[task]
        if task < 0:
            break
    return run


def _give_lane(simulator: Simulator, lanes: list[int], run: Sequence[int], lane: int) -> bool:
    """Put the tasks of the run on the lane, where they have a mode there; return whether that changed anything."""
    changed = False
    for task in run:
        if lanes[task] != lane and simulator.durations[task][lane] is not None:
            lanes[task] = lane
            changed = True
    return changed


def _change_split(
    simulator: Simulator,
    lanes: list[int],
    window: Sequence[int],
    split: Sequence[int],
    keys: Sequence[int],
    rng: random.Random,
) -> bool:
    """Move the tasks of the window to lanes of the split, equal keys to equal lanes; a negative key stays."""
    target: dict[int, int] = {}
    offset = rng.randrange(len(split))
    changed = False
    for task in window:
        key = keys[task]
        if key >= 0:
            lane = target.setdefault(key, split[(offset + len(target)) % len(split)])
            if lanes[task] != lane and simulator.durations[task][lane] is not None:
                lanes[task] = lane
                changed = True
    return changed


def _move_run(simulator: Simulator, order: Sequence[int], run: Sequence[int], *, early: bool) -> list[int]:
    """Return a topological order with the tasks of the run as early, or as late, as their neighbours allow."""
    neighbours: Callable[[int], Sequence[int]]
    if early:
        moving, rest, neighbours = list(run), order, simulator.predecessors.__getitem__
    else:
        moving, rest, neighbours = list(reversed(run)), order[::-1], simulator.successors.__getitem__
    members = set(run)
    missing = {task: sum(other not in members for other in neighbours(task)) for task in moving}
    watchers: dict[int, list[int]] = {}
    for task in moving:
        for other in neighbours(task):
            if other not in members:
                watchers.setdefault(other, []).append(task)
    placed: list[int] = []
    head = 0

    def place_ready() -> None:
        nonlocal head
        while head < len(moving) and not missing[moving[head]]:
            placed.append(moving[head])
            head += 1

    place_ready()
    for task in rest:
        if task not in members:
            placed.append(task)
            if task in watchers:
                for waiting in watchers[task]:
                    missing[waiting] -= 1
                place_ready()
    return placed if early else placed[::-1]
