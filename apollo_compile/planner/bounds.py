"""A proven lower bound of the makespan: a linear program finds a proof, integer arithmetic checks it.

    lower_bound(problem) -> integer that is at most the makespan of every valid schedule

Let y[t, m] be 1 where task t runs in mode m, s[t] its start and C the makespan. Every schedule satisfies

(1) order    s[b]  >=  s[a] + sum over m of d[a, m] y[a, m]                            a before b; C for s[b] at the end
(2) load     s[b]  >=  s[a] + sum over m of d[a, m] y[a, m] + c + sum over t in S, m of u[t, m, r] y[t, m] / cap[r]
             with S a set of tasks that all come after a and before b: they run one after the other on atom r, or share
             the capacity of renewable resource r, between the end of a and the start of b. Without a, they start at c1
             or later, their least head; without b, c2 follows the end of the last, their least tail; c = c1 + c2.
             u = time on the atom, or time x (demand + amounts that the task begins to hold)

Add them with weights w >= 0. The remaining terms in s[t] are bounded by  head[t] <= s[t] <= C - shortest[t] - tail[t],
and the mode of every task can be chosen independently, so

    C * (weight into the end + surplus weight into starts)
          >=  constants + sum over t of  min over m of (weighted coefficients of y[t, m])

for *any* weights (a Lagrangian relaxation). The weights are the dual values of the linear program over (1) and (2).
Violated loads are added as cuts until there are none or the bound stops improving: of all pairs (a, b), with S all
tasks between, those with the longest path through them. Then the weights are rounded and the inequality is evaluated in
integers, so the proof depends neither on the solver nor on floating point.

The result is the largest of this bound, the longest path and each load alone; all of them ignore hand-overs. In the
linear program a task may be half on many units and half on few, which weakens the bound by a few percent where two
towers of few large layers share the device.

Sources: Mingozzi et al., "An exact algorithm for the RCPSP", Management Science 44, 1998,
https://doi.org/10.1287/mnsc.44.5.714 (relaxation); Carlier, Pinson, "An algorithm for solving the job-shop problem",
Management Science 35, 1989, https://doi.org/10.1287/mnsc.35.2.164 (heads and tails)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import tail_lengths

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp

MAX_ROUNDS = 60
MAX_NEW_CUTS = 8
"""Loads added in one round."""
PATIENCE = 6
LEAST_GAIN = 3e-4
"""Rounds stop when the bound has not improved by this share in `PATIENCE` rounds."""
LEAST_VIOLATION = 3e-4
"""Share of the bound by which a load must be violated."""
WEIGHT_STEPS = 10**9
"""Weights are rounded to this grid for the integer evaluation."""
LOAD_STEPS = 2**30
"""Loads are rounded to this grid in the search for cuts, so that sums are exact in any order of addition."""
MAX_SOLVER_TIME = 1.0
"""Deterministic seconds of one solve of the linear program."""

_Array = npt.NDArray[np.float64]


def lower_bound(problem: Problem, *, use_program: bool = True, deadline: float = math.inf) -> int:
    """Return a lower bound of the makespan of every valid schedule.

    Arguments:
        problem: the problem to bound.
        use_program: also solve the linear program, which needs OR-Tools.
        deadline: value of `time.monotonic` after which the program gets no more cuts.
    """
    if not problem.tasks:
        return 0
    network = _Network(problem)
    longest_path = max(head + tail for head, tail in zip(network.heads, network.tails_with, strict=True))
    loads = network.first_loads()
    claims = [longest_path, *(network.evaluate([load], [1]) for load in loads)]
    if not use_program:
        return max(claims)
    program = _Program(network, scale=max(claims))
    for cut in (*network.orders(), *loads):
        program.add(cut)
    values: list[float] = []
    while len(values) < MAX_ROUNDS and program.solve():
        values.append(program.value())
        if len(values) > PATIENCE and values[-1] < values[-1 - PATIENCE] * (1 + LEAST_GAIN):
            break
        if time.monotonic() >= deadline or not program.add_violated():
            break
    if values:
        claims.append(network.evaluate(program.cuts, program.rounded_weights()))
    return max(claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Constraint (1), which has no tasks and no resource, or (2)."""

    after: int | None
    before: int | None
    resource: int | None = None
    constant: int = 0
    tasks: tuple[int, ...] = ()


class _Network:
    """A problem in the form that the bound needs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modes = [
            [task.modes[mode] for mode in problem.fitting_modes(number)] or list(task.modes)
            for number, task in enumerate(problem.tasks)
        ]
        self.durations = [[mode.duration for mode in modes] for modes in self.modes]
        self.capacities = [1] * len(problem.atom_sizes) + list(problem.capacities)
        """Capacities of atoms, and then of renewable resources."""
        self.uses = [
            *(self._uses_of_atom(atom) for atom in range(len(problem.atom_sizes))),
            *(self._uses_of_renewable(resource) for resource in range(len(problem.capacities))),
        ]
        """Per resource, task and mode: amount x time."""
        self.successors = problem.successors()
        self.is_before = _closure(self.successors)
        shortest = [min(durations) for durations in self.durations]
        self.tails = tail_lengths(self.successors, shortest)
        """Least time from the end of a task to the end of the schedule."""
        self.tails_with = [tail + own for tail, own in zip(self.tails, shortest, strict=True)]
        """Least time from the start of a task to the end of the schedule."""
        self.heads: list[int] = []
        for task in problem.tasks:
            self.heads.append(max((self.heads[other] + shortest[other] for other in task.predecessors), default=0))

    def _uses_of_atom(self, atom: int) -> list[list[int]]:
        lanes = self.problem.lanes
        return [[mode.duration if atom in lanes[mode.lane] else 0 for mode in modes] for modes in self.modes]

    def _uses_of_renewable(self, resource: int) -> list[list[int]]:
        held = [self.problem.held(task, resource) for task in range(len(self.modes))]
        return [
            [mode.duration * (mode.demand(resource) + held[task]) for mode in modes]
            for task, modes in enumerate(self.modes)
        ]

    def orders(self) -> Iterator[_Cut]:
        """Yield all constraints (1)."""
        for task, successors in enumerate(self.successors):
            for after in successors or (None,):
                yield _Cut(after=task, before=after)

    def first_loads(self) -> list[_Cut]:
        """Return the constraint (2) of all tasks, for every resource."""
        everything = tuple(range(len(self.modes)))
        return [self.load(resource, everything) for resource, capacity in enumerate(self.capacities) if capacity]

    def load(
        self, resource: int, tasks: tuple[int, ...], *, after: int | None = None, before: int | None = None
    ) -> _Cut:
        """Return a constraint (2); the tasks come after `after` and before `before`."""
        head = min(self.heads[task] for task in tasks) if after is None else 0
        tail = min(self.tails[task] for task in tasks) if before is None else 0
        return _Cut(after=after, before=before, resource=resource, constant=head + tail, tasks=tasks)

    def terms(self, cut: _Cut) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield (task, coefficient per mode) of a constraint, multiplied by the capacity of its resource."""
        if cut.after is not None:
            yield cut.after, [duration * self.capacity(cut) for duration in self.durations[cut.after]]
        if cut.resource is not None:
            for task in cut.tasks:
                yield task, self.uses[cut.resource][task]

    def capacity(self, cut: _Cut) -> int:
        """Return the factor that makes the coefficients of a constraint integers."""
        return 1 if cut.resource is None else self.capacities[cut.resource]

    def evaluate(self, cuts: Sequence[_Cut], weights: Sequence[int]) -> int:
        """Return the bound that follows from integer weights >= 0, rounded up because makespans are integers."""
        charges = [[0] * len(modes) for modes in self.modes]
        surplus = [0] * len(self.modes)
        """Sum of the weighted coefficients of every start."""
        into_end = constant = 0
        for cut, weight in zip(cuts, weights, strict=True):
            scaled = weight * self.capacity(cut)
            if not weight:
                continue
            constant += scaled * cut.constant
            if cut.before is None:
                into_end += scaled
            else:
                surplus[cut.before] += scaled
            if cut.after is not None:
                surplus[cut.after] -= scaled
            for task, factors in self.terms(cut):
                charges[task] = [old + weight * factor for old, factor in zip(charges[task], factors, strict=True)]
        for task, left in enumerate(surplus):
            into_end += max(0, left)
            constant += left * self.tails_with[task] if left > 0 else -left * self.heads[task]
        constant += sum(min(row) for row in charges)
        return max(0, -(-constant // into_end)) if into_end else 0


class _Program:
    """The linear program over (1) and (2), to which rows can be added."""

    def __init__(self, network: _Network, *, scale: int) -> None:
        from ortools.linear_solver import pywraplp

        self.network = network
        self.scale = scale
        """Divisor of all times; it makes the optimum about 1."""
        self.cuts: list[_Cut] = []
        self._known: set[_Cut] = set()
        self._solver: pywraplp.Solver = pywraplp.Solver.CreateSolver("GLOP")
        self._solver.SetSolverSpecificParametersAsString(f"max_deterministic_time: {MAX_SOLVER_TIME}")
        self._infinity = self._solver.infinity()
        self._end = self._solver.NumVar(0, self._infinity, "")
        self._starts = [self._solver.NumVar(0, self._infinity, "") for _ in network.modes]
        self._modes = [[self._solver.NumVar(0, self._infinity, "") for _ in modes] for modes in network.modes]
        self._rows: list[pywraplp.Constraint] = []
        self._solver.Minimize(self._end)
        for variables in self._modes:
            row = self._solver.Constraint(1, 1)
            for variable in variables:
                row.SetCoefficient(variable, 1)

    def add(self, cut: _Cut) -> bool:
        """Add a constraint; return whether it is new."""
        if cut in self._known:
            return False
        self._known.add(cut)
        self.cuts.append(cut)
        row = self._solver.Constraint(cut.constant / self.scale, self._infinity)
        row.SetCoefficient(self._end if cut.before is None else self._starts[cut.before], 1)
        if cut.after is not None:
            row.SetCoefficient(self._starts[cut.after], -1)
        divisor = self.scale * self.network.capacity(cut)
        for task, factors in self.network.terms(cut):
            for variable, factor in zip(self._modes[task], factors, strict=True):
                if factor:
                    row.SetCoefficient(variable, -factor / divisor)
        self._rows.append(row)
        return True

    def solve(self) -> bool:
        """Solve the program; return whether an optimum was found."""
        return bool(self._solver.Solve() == self._solver.OPTIMAL)

    def value(self) -> float:
        """Return the makespan of the linear program."""
        return float(self._end.solution_value())

    def rounded_weights(self) -> list[int]:
        """Return integer weights of the constraints, which `evaluate` multiplies by capacities."""
        steps = WEIGHT_STEPS * max([1, *self.network.capacities])
        return [
            max(0, round(row.dual_value() * steps / self.network.capacity(cut)))
            for cut, row in zip(self.cuts, self._rows, strict=True)
        ]

    def add_violated(self) -> bool:
        """Add loads that the optimum violates, the most violated first; return whether there were any."""
        steps = LOAD_STEPS / self.scale
        chosen = [[variable.solution_value() for variable in variables] for variables in self._modes]
        durations = _weighted(self.network.durations, chosen, steps)
        loads = [
            _weighted(uses, chosen, steps / capacity) if capacity else np.zeros(len(chosen))
            for uses, capacity in zip(self.network.uses, self.network.capacities, strict=True)
        ]
        heads, tails = self._longest_paths(durations, loads, steps)
        least = self.value() * LOAD_STEPS * (1 + LEAST_VIOLATION)
        found: list[tuple[float, _Cut]] = []
        for resource, load in enumerate(loads):
            found += [pair for pair in self._loads_between(resource, load, heads + durations, tails) if pair[0] > least]
        found.sort(key=lambda pair: -pair[0])
        num_cuts = len(self.cuts)
        for _, cut in found:
            if self.add(cut) and len(self.cuts) >= num_cuts + MAX_NEW_CUTS:
                break
        return len(self.cuts) > num_cuts

    def _longest_paths(self, durations: _Array, loads: Sequence[_Array], steps: float) -> tuple[_Array, _Array]:
        """Return, per task, the longest path to its start and from its start to the end, over all constraints."""
        num_tasks = len(durations)
        into: list[list[tuple[int | None, float]]] = [[] for _ in durations]
        out: list[list[tuple[int | None, float]]] = [[] for _ in durations]
        for cut in self.cuts:
            length = float(round(cut.constant * steps))
            length += float(durations[cut.after]) if cut.after is not None else 0
            length += float(loads[cut.resource][list(cut.tasks)].sum()) if cut.resource is not None else 0
            if cut.before is not None:
                into[cut.before].append((cut.after, length))
            if cut.after is not None:
                out[cut.after].append((cut.before, length))
        heads, tails = [0.0] * num_tasks, [0.0] * num_tasks
        for task in range(num_tasks):
            heads[task] = max((length + (0 if a is None else heads[a]) for a, length in into[task]), default=0.0)
        for task in reversed(range(num_tasks)):
            tails[task] = max(length + (0 if b is None else tails[b]) for b, length in out[task])
        return np.array(heads), np.array(tails)

    def _loads_between(self, resource: int, load: _Array, ends: _Array, tails: _Array) -> Iterator[tuple[float, _Cut]]:
        """Yield, for the beginning and every task, the load after it with the longest path through it."""
        num_tasks = len(load)
        come_after = np.vstack([self.network.is_before, np.ones(num_tasks)])
        come_before = np.hstack([self.network.is_before, np.ones((num_tasks, 1))])
        between = (come_after * load) @ come_before
        lengths = np.append(ends, 0.0)[:, None] + between + np.append(tails, 0.0)[None, :]
        lengths = np.where(between > 0, lengths, 0.0)
        for after, before in enumerate(lengths.argmax(axis=1)):
            tasks = np.flatnonzero(come_after[after] * come_before[:, before])
            if lengths[after, before] > 0:
                yield (
                    float(lengths[after, before]),
                    self.network.load(
                        resource,
                        tuple(tasks.tolist()),
                        after=after if after < num_tasks else None,
                        before=int(before) if before < num_tasks else None,
                    ),
                )


def _closure(successors: Sequence[Sequence[int]]) -> _Array:
    """Return 1 where the task of the row comes before the task of the column."""
    is_before = np.zeros((len(successors), len(successors)))
    for task in reversed(range(len(successors))):
        for after in successors[task]:
            is_before[task, after] = 1
            is_before[task] = np.maximum(is_before[task], is_before[after])
    return is_before


def _weighted(factors: Sequence[Sequence[int]], chosen: Sequence[Sequence[float]], scale: float) -> _Array:
    """Return, per task, the weighted sum over its modes, rounded to the grid of loads."""
    return np.array(
        [
            round(scale * math.fsum(factor * share for factor, share in zip(row, shares, strict=True)))
            for row, shares in zip(factors, chosen, strict=True)
        ],
        dtype=np.float64,
    )
