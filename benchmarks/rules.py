"""Baselines: the scheduling rules of other systems, on the same lanes and in the same simulator.

    BASELINES[name](problem) -> Schedule

Each rule chooses a lane per task and an order; a task runs in its fastest mode on its lane, or on lane 0 if it has none
there. A replay then starts every task as early as the order allows. Devices and streams of the rules are mapped to
lanes:

* An equal split is, of the splits into as many lanes, the one whose lanes differ least. Its lanes are the processors of
  rules with a fixed set of processors. Stream k is lane k of it, modulo its lanes. These rules get the equal split with
  which they make the shortest schedule.
* In the originals, a task that runs alone has the whole device, because streams have no quota and processors of HEFT
  are separate devices. So for the rules with streams and for HEFT, a task that cannot overlap with any other, because
  all others come before or after it, is on lane 0.
* Waves may use any split, because the rule chooses one per wave.

Guarantees: every schedule respects precedence and atoms; where there is no split, it is the serial one. Like the
originals, the rules ignore renewable resources and interference.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence

from apollo_compile.planner.greedy import splits
from apollo_compile.planner.problem import Problem, TaskSchedule
from apollo_compile.planner.simulate import Simulator, serial_schedule


def equal_split(problem: Problem) -> TaskSchedule:
    """Cut the device into equal lanes, and keep every branch on one of them.

    A branch is a chain in which each task is followed by its successor with the longest path to the end. A new branch
    takes the lane with the least work so far. No task is on lane 0, unless there is only one branch.
    """
    simulator = Simulator(problem)
    branches = _branches(simulator)
    if not any(branches):
        return serial_schedule(problem)

    def place(split: _Split) -> TaskSchedule:
        load = dict.fromkeys(split, 0)
        lane_by_branch: dict[int, int] = {}
        for task, branch in enumerate(branches):
            lane = lane_by_branch.setdefault(branch, min(split, key=load.__getitem__))
            load[lane] += _duration(simulator, task, lane)
        return _replay(simulator, range(len(branches)), [lane_by_branch[branch] for branch in branches])

    return _on_equal_splits(problem, place)


def critical_path_round_robin(problem: Problem) -> TaskSchedule:
    """Keep the path with most tasks on the first stream, and distribute the others round-robin.

    The rule of apex torchsched: the critical path is the deepest one, and the order is that of the graph.
    Source: `MultiCudaStreamScheduler.schedule_multi_cuda_streams` in apex/contrib/torchsched/inductor/scheduler.py,
    https://github.com/NVIDIA/apex
    """
    simulator = Simulator(problem)
    path = _deepest_path(simulator)

    def place(split: _Split) -> TaskSchedule:
        side_streams = itertools.cycle(range(1, len(split)))
        streams = [0 if task in path else next(side_streams) for task in range(len(problem.tasks))]
        return _replay(simulator, range(len(streams)), _lanes_of_streams(simulator, streams, split))

    return _on_equal_splits(problem, place)


def first_successor_streams(problem: Problem) -> TaskSchedule:
    """Continue the stream of the first predecessor whose stream no other task continues; else open a new stream.

    The rule of Opara's stream allocator. The order is that of the graph, because Opara's own order needs the shared
    memory of every kernel.
    Source: StreamAllocator.py in https://github.com/icloud-ecnu/Opara; https://arxiv.org/abs/2312.10351
    """
    simulator = Simulator(problem)
    streams: list[int] = []
    num_streams = 0
    is_claimed = [False] * len(problem.tasks)
    for predecessors in simulator.predecessors:
        unclaimed = next((other for other in predecessors if not is_claimed[other]), None)
        if unclaimed is None:
            streams.append(num_streams)
            num_streams += 1
        else:
            is_claimed[unclaimed] = True
            streams.append(streams[unclaimed])
    return _on_equal_splits(
        problem, lambda split: _replay(simulator, range(len(streams)), _lanes_of_streams(simulator, streams, split))
    )


def heft(problem: Problem) -> TaskSchedule:
    """Place the task with the highest upward rank on the lane where it ends first, in an idle gap if there is one.

        rank[t] = mean duration of t + max over successors s of (handover + rank[s])

    Ties go to the wider lane. Source: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling
    for heterogeneous computing", IEEE TPDS 13, 2002, https://doi.org/10.1109/71.993206
    """
    simulator = Simulator(problem)
    return _on_equal_splits(problem, lambda split: _heft_on(simulator, split))


def wavefront(problem: Problem) -> TaskSchedule:
    """Schedule level by level; run each level in waves, and choose a split for each wave.

    Tasks in a row without branches are one chain (Spindle's MetaOp), chains of equal depth are a level. A wave assigns
    the longest remaining chains to the lanes of one split, the longest to the widest, and lasts until the first of them
    has ended; of the other chains, it takes the tasks that start before that. Among all splits, and lane 0 alone, the
    one with most work per time is taken, where work is the duration on lane 0. Spindle solves a relaxed problem to
    divide any number of devices; here a few splits can be tried. A wave waits for an earlier one only where its tasks
    do.
    Source: Wang et al., "Spindle: efficient distributed training of multi-task large models via wavefront scheduling",
    ASPLOS 2025, https://doi.org/10.1145/3676641.3715992
    """
    found = [_widest_first(problem, split) for split in splits(problem)]
    if not found:
        return serial_schedule(problem)
    simulator = Simulator(problem)
    order: list[int] = []
    lanes = [0] * len(problem.tasks)
    for chains in _levels(simulator):
        left = chains
        while left:
            left.sort(key=lambda chain: (-_time_of(simulator, chain, 0), chain))
            waves = [_wave(simulator, split, left) for split in ((0,), *found)]
            wave = max(waves, key=lambda wave: _work_rate(simulator, wave))
            for chain, (lane, tasks) in zip(left, wave, strict=False):
                del chain[: len(tasks)]
                order += tasks
                for task in tasks:
                    lanes[task] = lane
            left = [chain for chain in left if chain]
    return _replay(simulator, order, lanes)


BASELINES: dict[str, Callable[[Problem], TaskSchedule]] = {
    "serial": serial_schedule,
    "equal split": equal_split,
    "critical path + round-robin": critical_path_round_robin,
    "first-successor streams": first_successor_streams,
    "HEFT": heft,
    "wavefront": wavefront,
}
"""Baselines by their names in reports and benchmarks."""


# ----------------------------------------------------------------------------------------------------------- lanes


_Split = tuple[int, ...]
"""Lanes, the widest first."""


def _widest_first(problem: Problem, split: _Split) -> _Split:
    return tuple(sorted(split, key=lambda lane: -_num_units(problem, lane)))


def _on_equal_splits(problem: Problem, place: Callable[[_Split], TaskSchedule]) -> TaskSchedule:
    """Return the shortest of the schedules that a rule makes on the equal splits; the serial one if there are none."""
    equal: dict[int, _Split] = {}
    for split in splits(problem):
        units = [_num_units(problem, lane) for lane in split]
        known = [_num_units(problem, lane) for lane in equal.get(len(split), ())]
        if not known or max(units) - min(units) < max(known) - min(known):
            equal[len(split)] = split
    schedules = [place(_widest_first(problem, split)) for split in equal.values()]
    return min(schedules, key=lambda schedule: schedule.makespan, default=serial_schedule(problem))


def _num_units(problem: Problem, lane: int) -> int:
    return sum(problem.atom_sizes[atom] for atom in problem.lanes[lane])


def _lanes_of_streams(simulator: Simulator, streams: Sequence[int], split: Sequence[int]) -> list[int]:
    """Return the lane of every task: that of its stream, or lane 0 if no other task can overlap with it."""
    alone = _find_alone(simulator)
    return [0 if task in alone else split[stream % len(split)] for task, stream in enumerate(streams)]


def _find_alone(simulator: Simulator) -> frozenset[int]:
    """Return the tasks that cannot overlap with any other, because all others come before or after them."""
    num_tasks = len(simulator.successors)
    before, after = [0] * num_tasks, [0] * num_tasks  # sets of tasks as bits
    for task, predecessors in enumerate(simulator.predecessors):
        for other in predecessors:
            before[task] |= before[other] | 1 << other
    for task in reversed(range(num_tasks)):
        for other in simulator.successors[task]:
            after[task] |= after[other] | 1 << other
    return frozenset(task for task in range(num_tasks) if (before[task] | after[task]).bit_count() == num_tasks - 1)


def _duration(simulator: Simulator, task: int, lane: int) -> int:
    return simulator.problem.tasks[task].modes[_mode(simulator, task, lane)].duration


def _mode(simulator: Simulator, task: int, lane: int) -> int:
    fastest = simulator.mode_by_lane[task]
    return fastest[lane] if lane in fastest else fastest[0]


def _replay(simulator: Simulator, order: Sequence[int], lanes: Sequence[int]) -> TaskSchedule:
    return simulator.replay(order, [_mode(simulator, task, lane) for task, lane in enumerate(lanes)])


# ---------------------------------------------------------------------------------------------------------- chains


def _branches(simulator: Simulator) -> list[int]:
    """Return the branch of every task, named by its first task: that of the first predecessor that it continues."""
    next_in_branch = [
        max(later, key=lambda task: simulator.shortest[task] + simulator.tails[task], default=-1)
        for later in simulator.successors
    ]
    found: list[int] = []
    for task, predecessors in enumerate(simulator.predecessors):
        found.append(next((found[other] for other in predecessors if next_in_branch[other] == task), task))
    return found


def _deepest_path(simulator: Simulator) -> frozenset[int]:
    """Return the tasks of a path with most tasks; ties go to the first."""
    depths: list[int] = []
    for predecessors in simulator.predecessors:
        depths.append(1 + max((depths[other] for other in predecessors), default=0))
    path = [max(range(len(depths)), key=depths.__getitem__, default=-1)]
    while depths and depths[path[-1]] > 1:
        path.append(max(simulator.predecessors[path[-1]], key=depths.__getitem__))
    return frozenset(path)


def _levels(simulator: Simulator) -> list[list[list[int]]]:
    """Return, per depth, the chains of tasks in a row without branches."""
    chains: list[list[int]] = []
    chain_of: list[int] = []
    depths: list[int] = []
    for task, predecessors in enumerate(simulator.predecessors):
        if len(predecessors) == 1 and len(simulator.successors[predecessors[0]]) == 1:
            chain_of.append(chain_of[predecessors[0]])
            chains[chain_of[task]].append(task)
        else:
            chain_of.append(len(chains))
            chains.append([task])
            depths.append(1 + max((depths[chain_of[other]] for other in predecessors), default=-1))
    levels: list[list[list[int]]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for chain, depth in zip(chains, depths, strict=True):
        levels[depth].append(chain)
    return levels


# ----------------------------------------------------------------------------------------------------------- waves

_Wave = list[tuple[int, list[int]]]
"""Lanes, and the tasks that they run."""


def _wave(simulator: Simulator, split: Sequence[int], chains: Sequence[Sequence[int]]) -> _Wave:
    """Return the wave of the first chains on the lanes of the split."""
    given = list(zip(split, chains, strict=False))
    end = min(_time_of(simulator, chain, lane) for lane, chain in given)
    wave: _Wave = []
    for lane, chain in given:
        begins = itertools.accumulate((_duration(simulator, task, lane) for task in chain), initial=0)
        wave.append((lane, [task for task, begin in zip(chain, begins, strict=False) if begin < end]))
    return wave


def _work_rate(simulator: Simulator, wave: _Wave) -> float:
    work = sum(_time_of(simulator, tasks, 0) for _, tasks in wave)
    return work / max(_time_of(simulator, tasks, lane) for lane, tasks in wave)


def _time_of(simulator: Simulator, tasks: Iterable[int], lane: int) -> int:
    return sum(_duration(simulator, task, lane) for task in tasks)


# ------------------------------------------------------------------------------------------------------------ HEFT


def _heft_on(simulator: Simulator, split: _Split) -> TaskSchedule:
    problem = simulator.problem
    choices = _processors(simulator, split)
    rank = _upward_ranks(simulator, choices)
    calendar = _Calendar(problem)
    starts, ends, lanes = [0] * len(rank), [0] * len(rank), [0] * len(rank)
    for task in sorted(range(len(rank)), key=lambda task: -rank[task]):
        for lane, duration in choices[task].items():
            ready = [
                ends[other] + (problem.handover if lanes[other] != lane else 0)
                for other in simulator.predecessors[task]
            ]
            start = calendar.earliest_start(lane, duration, max(ready, default=0))
            if not ends[task] or start + duration < ends[task]:
                starts[task], ends[task], lanes[task] = start, start + duration, lane
        calendar.book(lanes[task], starts[task], ends[task])
    return _replay(simulator, sorted(range(len(rank)), key=starts.__getitem__), lanes)


def _processors(simulator: Simulator, split: Sequence[int]) -> list[dict[int, int]]:
    """Return, per task, its duration on every lane that it may take."""
    alone = _find_alone(simulator)
    found = []
    for task, fastest in enumerate(simulator.mode_by_lane):
        lanes = [lane for lane in split if lane in fastest and task not in alone] or [0]
        found.append({lane: _duration(simulator, task, lane) for lane in lanes})
    return found


def _upward_ranks(simulator: Simulator, choices: Sequence[dict[int, int]]) -> list[float]:
    ranks = [0.0] * len(choices)
    for task in reversed(range(len(choices))):
        mean = sum(choices[task].values()) / len(choices[task])
        ranks[task] = mean + max(
            (simulator.handover + ranks[after] for after in simulator.successors[task]), default=0.0
        )
    return ranks


class _Calendar:
    """Bookings of every lane, including those of lanes that share its atoms."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._taken: list[list[tuple[int, int]]] = [[] for _ in problem.lanes]
        """Per lane, ascending: (end, start) of the times in which it is taken, with hand-overs."""

    def earliest_start(self, lane: int, duration: int, ready: int) -> int:
        """Return the first start from `ready` on, such that the lane is free for the duration."""
        taken, start = self._taken[lane], ready
        for free_again, free_before in taken[bisect.bisect_right(taken, ready, key=lambda entry: entry[0]) :]:
            if start + duration > free_before:  # later entries are free again later, so no earlier one gets in the way
                start = free_again
        return start

    def book(self, lane: int, start: int, end: int) -> None:
        """Take the lane from start to end."""
        for other, atoms in enumerate(self._problem.lanes):
            if atoms & self._problem.lanes[lane]:
                handover = self._problem.handover if other != lane else 0
                bisect.insort(self._taken[other], (end + handover, start - handover))
