"""A proven lower limit of the makespan, without an LP solver.

    lower_bound(problem) -> integer that no valid schedule can beat

Let y[t, l] be 1 where task t runs on lane l. Every schedule of makespan C keeps

(1) path    sum over t on a path, l of d[t, l] y[t, l]                                       <= C
(2) load    h + q + sum over t in S, l that cover atom a of d[t, l] y[t, l]                  <= C
            with S = tasks whose head is at least h and whose tail is at least q

where head and tail are the longest chains of least durations before and behind a task: all of S runs on atom a one
after the other, not before h, and q remains when the last has ended. Weigh the constraints with w >= 0, sum w = 1,
and add:

    C  >=  sum w (h + q) + sum over t of  min over l of  d[t, l] * (weights of paths through t + of loads of t on l)

which holds for *any* weights, because it lets every task choose its best lane by itself (a Lagrangian relaxation of
the LP over (1) and (2)). Good weights come from multiplicative updates: constraints that the present choice of lanes
violates most gain weight, and the longest path and the heaviest loads under that choice join the set. The last step
rounds the weights and evaluates the inequality in integers, so the claim does not rest on floating point. Hand-overs
are ignored.

Source: Mingozzi et al., "An exact algorithm for the RCPSP", Management Science 44, 1998,
https://doi.org/10.1287/mnsc.44.5.714; Arora, Hazan, Kale, "The multiplicative weights update method", 2012,
https://doi.org/10.4086/toc.2012.v008a006
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import tail_lengths

_Number = TypeVar("_Number", int, float)

MAX_ROUNDS = 120
MAX_TASK_VISITS = 30_000
"""Rounds x tasks: what bounds the time."""
NUM_THRESHOLDS = 8
"""Heads and tails considered for the loads, each."""
WEIGHT_STEPS = 1_000_000
"""Weights are rounded to this grid for the integer evaluation."""


def lower_bound(problem: Problem) -> int:
    """Return a number that the makespan of no valid schedule is below."""
    if not problem.tasks:
        return 0
    network = _Network(problem)
    shortest = [min(mode.duration for mode in task.modes) for task in problem.tasks]
    cuts: dict[_Cut, None] = {network.longest_path(shortest): None}
    for atom in range(len(problem.atom_sizes)):
        cuts[_Cut(atom=atom, constant=0, tasks=tuple(range(len(problem.tasks))))] = None
    total = sum(problem.atom_sizes)
    by_path = [1.0] + [0.0] * len(problem.atom_sizes)
    by_load = [0.0] + [size / total for size in problem.atom_sizes]
    weights = [(path + load) / 2 for path, load in zip(by_path, by_load, strict=True)]
    best = max(((network.evaluate(list(cuts), w)[0], list(cuts), w) for w in (by_path, by_load)), key=lambda b: b[0])
    for index in range(min(MAX_ROUNDS, max(12, MAX_TASK_VISITS // len(problem.tasks)))):
        active = list(cuts)
        value, choice = network.evaluate(active, weights)
        if value > best[0]:
            best = (value, active, weights)
        chosen = [problem.tasks[task].modes[mode].duration for task, mode in enumerate(choice)]
        gains = [network.value(cut, choice) for cut in active]
        for cut in (network.longest_path(chosen), *network.heaviest_loads(choice)):
            if cut not in cuts and network.value(cut, choice) > max(gains):
                cuts[cut] = None
                gains.append(network.value(cut, choice))
                weights = [*(weight * 0.98 for weight in weights), 0.02]
        step = 3.0 / math.sqrt(index + 4) / max(1.0, max(gains) - min(gains))
        grown = [weight * math.exp(step * (gain - max(gains))) for weight, gain in zip(weights, gains, strict=True)]
        weights = [max(weight / sum(grown), 1e-9) for weight in grown]
    exact = [round(weight * WEIGHT_STEPS) for weight in best[2]]
    return max(
        network.evaluate_exactly(best[1], exact), max(network.tails[t] + shortest[t] for t in range(len(shortest)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Constraint (1), where `atom` is None, or (2)."""

    atom: int | None
    constant: int
    """h + q."""
    tasks: tuple[int, ...]


class _Network:
    """One problem in the shape that the bound needs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.predecessors = [task.predecessors for task in problem.tasks]
        shortest = [min(mode.duration for mode in task.modes) for task in problem.tasks]
        self.tails = tail_lengths(problem.successors(), shortest)
        self.heads: list[int] = []
        for predecessors in self.predecessors:
            self.heads.append(max((self.heads[other] + shortest[other] for other in predecessors), default=0))
        self.head_steps = _thresholds(self.heads)
        self.tail_steps = _thresholds(self.tails)

    def evaluate(self, cuts: Sequence[_Cut], weights: Sequence[float]) -> tuple[float, list[int]]:
        """Return the bound under these weights and the mode that every task chooses for it."""
        on_path, on_atom = self._prices(cuts, weights, 1e-7)
        value = sum(weight * cut.constant for cut, weight in zip(cuts, weights, strict=True))
        choice = []
        lanes = self.problem.lanes
        for task_id, task in enumerate(self.problem.tasks):
            prices = on_atom[task_id]
            costs = [
                mode.duration * (on_path[task_id] + sum([prices[atom] for atom in lanes[mode.lane]]))
                for mode in task.modes
            ]
            least = min(costs)
            value += least
            choice.append(costs.index(least))
        return value / sum(weights), choice

    def evaluate_exactly(self, cuts: Sequence[_Cut], weights: Sequence[int]) -> int:
        """Return the bound under whole weights, rounded up: makespans are whole."""
        on_path, on_atom = self._prices(cuts, weights, 0)
        value = sum(weight * cut.constant for cut, weight in zip(cuts, weights, strict=True))
        for task_id, task in enumerate(self.problem.tasks):
            value += min(
                mode.duration
                * (on_path[task_id] + sum(on_atom[task_id][atom] for atom in self.problem.lanes[mode.lane]))
                for mode in task.modes
            )
        return int(-(-value // sum(weights)))

    def _prices(
        self, cuts: Sequence[_Cut], weights: Sequence[_Number], least: float
    ) -> tuple[list[_Number], list[list[_Number]]]:
        """Return, per task, the weight of the paths through it and of the loads that contain it, by atom."""
        zero = weights[0] * 0
        on_path = [zero] * len(self.predecessors)
        on_atom = [[zero] * len(self.problem.atom_sizes) for _ in self.predecessors]
        for cut, weight in zip(cuts, weights, strict=True):
            if weight <= least:
                continue
            if cut.atom is None:
                for task in cut.tasks:
                    on_path[task] += weight
            else:
                for task in cut.tasks:
                    on_atom[task][cut.atom] += weight
        return on_path, on_atom

    def value(self, cut: _Cut, choice: Sequence[int]) -> int:
        """Return the left-hand side of a constraint where every task runs in its chosen mode."""
        chosen = ((self.problem.tasks[task].modes[choice[task]]) for task in cut.tasks)
        lanes = self.problem.lanes
        return cut.constant + sum(mode.duration for mode in chosen if cut.atom is None or cut.atom in lanes[mode.lane])

    def longest_path(self, durations: Sequence[int]) -> _Cut:
        """Return the longest path under these durations."""
        ends: list[int] = []
        before: list[int] = []
        for task, predecessors in enumerate(self.predecessors):
            latest = max(predecessors, key=lambda other: ends[other], default=-1)
            before.append(latest)
            ends.append(durations[task] + (ends[latest] if latest >= 0 else 0))
        task = max(range(len(ends)), key=lambda last: ends[last])
        path = [task]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        return _Cut(atom=None, constant=0, tasks=tuple(reversed(path)))

    def heaviest_loads(self, choice: Sequence[int]) -> list[_Cut]:
        """Return, per atom, the load that the choice of modes makes largest."""
        num_heads, num_tails = len(self.head_steps), len(self.tail_steps)
        cuts = []
        for atom in range(len(self.problem.atom_sizes)):
            sums = [[0] * (num_tails + 1) for _ in range(num_heads + 1)]
            for task_id, task in enumerate(self.problem.tasks):
                mode = task.modes[choice[task_id]]
                if atom in self.problem.lanes[mode.lane]:
                    sums[_step(self.head_steps, self.heads[task_id])][_step(self.tail_steps, self.tails[task_id])] += (
                        mode.duration
                    )
            best = (-1, 0, 0)
            for i in reversed(range(num_heads)):
                for j in reversed(range(num_tails)):
                    sums[i][j] += sums[i + 1][j] + sums[i][j + 1] - sums[i + 1][j + 1]
                    if sums[i][j]:
                        best = max(best, (sums[i][j] + self.head_steps[i] + self.tail_steps[j], i, j))
            head, tail = self.head_steps[best[1]], self.tail_steps[best[2]]
            tasks = tuple(t for t in range(len(choice)) if self.heads[t] >= head and self.tails[t] >= tail)
            # h + q may grow to what the members really have: the same tasks, a stronger constraint
            constant = min(self.heads[t] for t in tasks) + min(self.tails[t] for t in tasks)
            cuts.append(_Cut(atom=atom, constant=constant, tasks=tasks))
        return cuts


def _thresholds(values: Sequence[int]) -> list[int]:
    """Return up to `NUM_THRESHOLDS` of the values, ascending, evenly spread and with the least."""
    distinct = sorted(set(values))
    stride = max(1, -(-len(distinct) // NUM_THRESHOLDS))
    return distinct[::stride]


def _step(steps: Sequence[int], value: int) -> int:
    """Return the index of the last step that is not above the value."""
    index = len(steps) - 1
    while steps[index] > value:
        index -= 1
    return index
