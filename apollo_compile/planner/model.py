"""The CP-SAT model of a problem: variables and constraints.

    build_model(problem, kept, makespans) -> Model

It has the constraints of `problem.py`, with the same numbers. on[t, m] is a literal, s[t, m] the start of t in mode m,
lane[t, l] the sum of on[t, m] over the modes on lane l, C the makespan:

(1) one mode       exactly one on[t, m];  on[t, m] => s[t, m] = start[t];
                   end[t] = start[t] + sum_m duration[t, m] * on[t, m]                      -> _add_task
(2) precedence     end[p] <= start[t];
                   on[t, m] => end[p] + handover * (1 - lane[p, lane of m]) <= s[t, m]      -> _order_tasks
(3) atoms          per atom: runs of the modes whose lane covers it do not overlap          -> _separate_on_atoms
    hand-over      per lane and atom of it, see Note [keep warm]                            -> _keep_lanes_apart
(4) renewable      per resource, one cumulative of runs, with demands
                   sum_m demand[t, m] * on[t, m], and of the lifetimes of holds             -> _limit_renewables
    lifetime       [start[t], last],  last >= end of t and of every reader                  -> _add_lifetime
(5) objective      minimise C,  least <= C <= longest makespan,  end[t] <= C                -> _bound_makespan
    energy         sum of amount * duration <= capacity * C, which (3) and (4) imply        -> _bound_energy

Every mode has its OWN start and optional interval. With optional intervals that share the start and end of their task,
CP-SAT 9.15 reports wrong optima and calls feasible problems infeasible (models in tests/planner/cpsat_repro). Without
atoms, modes differ in duration and demand only, and one interval per task, of variable length, is enough.

Note [keep warm]. A lane keeps its atoms warm for `handover` after each run. Other lanes may not run on a warm atom; the
lane itself may. Per lane l and atom a of l, a cumulative of capacity K, the number of tasks with a mode on l, holds

    runs on l, longer by handover         demand 1
    runs on other lanes that cover a      demand K

Runs of l are at most K, so they never exclude each other; a run of another lane excludes all of them. For i on l and j
on another lane that shares a with l: the constraint of l says that j is not within [start[i], end[i] + handover), that
of the lane of j says the same with i and j exchanged, and together that is (3). It is exact, with one more interval per
mode.

A reader of a hold that precedes another reader of it is left out. Amounts are divided by their common divisor; if they
are still larger than `MAX_AMOUNT` they are rounded, demands up and capacities down. The model is then tighter than the
problem, and `Model.is_exact` is False.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ortools.sat.python import cp_model

from apollo_compile.planner.problem import ExecutionMode, Problem, ResourceHold

MAX_AMOUNT = 1_000_000
"""Larger capacities are rounded, because capacity x makespan in nanoseconds must fit into 64 bits."""
MAX_INTEGER = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMode:
    """One mode of a task in the model."""

    task: int
    index: int
    mode: ExecutionMode
    on: cp_model.BoolVarT
    start: cp_model.IntVar
    """Start in this mode: a separate variable if the task has several modes and there are atoms, else the task's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldVariables:
    """Variables of a hold in the model."""

    hold: ResourceHold
    last: cp_model.IntVar
    length: cp_model.IntVar
    interval: cp_model.IntervalVar


class Model:
    """A CP-SAT model, with start, end and modes of every task."""

    def __init__(self, problem: Problem, makespans: tuple[int, int]) -> None:
        """Begin an empty model; `makespans` are the least and the largest makespan."""
        self.problem = problem
        self.horizon = makespans[1]
        self.cp = cp_model.CpModel()
        self.makespan = self.cp.new_int_var(*makespans, "makespan")
        self.starts: list[cp_model.IntVar] = []
        self.ends: list[cp_model.IntVar] = []
        self.durations: list[cp_model.IntVar | int] = []
        self.task_modes: list[list[TaskMode]] = []
        self.runs: dict[tuple[int, int], cp_model.IntervalVar] = {}
        """Per task and mode, the optional interval in which it uses its atoms; empty if there are no atoms."""
        self.choices: list[tuple[cp_model.IntVar, list[tuple[TaskMode, int]]]] = []
        """Variables whose value depends on the mode, with their values."""
        self.lifetimes: list[HoldVariables] = []
        self.is_exact = True
        """Whether no amount was rounded, so that the model is equivalent to the problem."""

    def on_lane(self, task: int, lane: int) -> list[cp_model.BoolVarT]:
        """Return the literals of the task's modes on the lane; exactly one is true if the task is on it."""
        return [task_mode.on for task_mode in self.task_modes[task] if task_mode.mode.lane == lane]


def build_model(problem: Problem, kept: Sequence[Sequence[int]], makespans: tuple[int, int]) -> Model:
    """Return the model with all constraints.

    Arguments:
        problem: the problem.
        kept: modes of every task that the model has.
        makespans: the least and the largest makespan.
    """
    model = Model(problem, makespans)
    for modes in kept:
        _add_task(model, modes)
    _order_tasks(model)
    _separate_on_atoms(model)
    _keep_lanes_apart(model)
    model.is_exact = _limit_renewables(model)
    _bound_makespan(model)
    return model


def _add_task(model: Model, modes: Sequence[int]) -> None:
    """Post (1) for the next task."""
    cp, horizon, task = model.cp, model.horizon, len(model.task_modes)
    start = cp.new_int_var(0, horizon, f"start {task}")
    has_own_starts = len(modes) > 1 and bool(model.problem.atom_sizes)
    task_modes = [
        TaskMode(
            task=task,
            index=index,
            mode=model.problem.tasks[task].modes[index],
            on=cp.new_bool_var(f"on {task} {index}"),
            start=cp.new_int_var(0, horizon, f"start {task} {index}") if has_own_starts else start,
        )
        for index in modes
    ]
    cp.add_exactly_one([task_mode.on for task_mode in task_modes])
    duration = _choice(model, [(task_mode, task_mode.mode.duration) for task_mode in task_modes], f"duration {task}")
    end = cp.new_int_var(0, horizon, f"end {task}")
    cp.add(end == start + duration)
    for task_mode in task_modes if model.problem.atom_sizes else ():
        length = task_mode.mode.duration
        cp.add(task_mode.start == start).only_enforce_if(task_mode.on)
        cp.add(end == task_mode.start + length).only_enforce_if(task_mode.on)
        run = cp.new_optional_fixed_size_interval_var(
            task_mode.start, length, task_mode.on, f"run {task} {task_mode.index}"
        )
        model.runs[task, task_mode.index] = run
    model.starts.append(start)
    model.durations.append(duration)
    model.ends.append(end)
    model.task_modes.append(task_modes)


def _choice(model: Model, amounts: list[tuple[TaskMode, int]], name: str) -> cp_model.IntVar | int:
    """Return a variable for the amount of the chosen mode, or the amount if all are equal."""
    values = sorted({amount for _, amount in amounts})
    if len(values) == 1:
        return values[0]
    chosen = model.cp.new_int_var_from_domain(cp_model.Domain.from_values(values), name)
    model.cp.add(chosen == sum(amount * task_mode.on for task_mode, amount in amounts))
    for task_mode, amount in amounts:
        model.cp.add(chosen == amount).only_enforce_if(task_mode.on)
    model.choices.append((chosen, amounts))
    return chosen


def _order_tasks(model: Model) -> None:
    """Post (2). Edges implied by longer paths are left out: if the lane changes on an edge, it does on the path."""
    cp, handover = model.cp, model.problem.handover
    for task, predecessors in enumerate(_direct_predecessors(model.problem)):
        for other in predecessors:
            cp.add(model.ends[other] <= model.starts[task])
            for task_mode in model.task_modes[task] if handover else ():
                same = model.on_lane(other, task_mode.mode.lane)
                if len(same) < len(model.task_modes[other]):
                    cp.add(model.ends[other] + handover * (1 - sum(same)) <= task_mode.start).only_enforce_if(
                        task_mode.on
                    )


def _direct_predecessors(problem: Problem) -> list[list[int]]:
    """Return the predecessors that are not before another predecessor."""
    ancestors = _ancestors(problem)
    return [
        [other for other in dict.fromkeys(task.predecessors) if not _is_before_any(ancestors, other, task.predecessors)]
        for task in problem.tasks
    ]


def _ancestors(problem: Problem) -> list[int]:
    """Return, per task, all tasks before it, as bits."""
    found: list[int] = []
    for task in problem.tasks:
        bits = 0
        for other in task.predecessors:
            bits |= found[other] | 1 << other
        found.append(bits)
    return found


def _is_before_any(ancestors: Sequence[int], task: int, others: Sequence[int]) -> bool:
    return any(ancestors[other] >> task & 1 for other in others)


def _separate_on_atoms(model: Model) -> None:
    """Post (3) without hand-over."""
    for lanes in _largest(_lanes_by_atom(model)):
        task_modes = _modes_on(model, lanes)
        model.cp.add_no_overlap([model.runs[task_mode.task, task_mode.index] for task_mode in task_modes])
        _bound_energy(model, [task_mode.mode.duration * task_mode.on for task_mode in task_modes], 1)


def _keep_lanes_apart(model: Model) -> None:
    """Post the hand-over of (3); see Note [keep warm]."""
    cp, handover = model.cp, model.problem.handover
    for lane in range(len(model.problem.lanes)) if handover else ():
        own = _modes_on(model, {lane})
        warm = [
            cp.new_optional_fixed_size_interval_var(
                task_mode.start,
                task_mode.mode.duration + handover,
                task_mode.on,
                f"warm {task_mode.task} {task_mode.index}",
            )
            for task_mode in own
        ]
        for others in _largest([lanes - {lane} for lanes in _lanes_by_atom(model) if lane in lanes]):
            runs = [model.runs[task_mode.task, task_mode.index] for task_mode in _modes_on(model, others)]
            if warm and runs:
                demands = [1] * len(warm) + [len(warm)] * len(runs)
                cp.add_cumulative([*warm, *runs], demands, len(warm))


def _lanes_by_atom(model: Model) -> list[frozenset[int]]:
    """Return the lanes that cover each atom."""
    problem = model.problem
    return [
        frozenset(lane for lane, atoms in enumerate(problem.lanes) if atom in atoms)
        for atom in range(len(problem.atom_sizes))
    ]


def _largest(sets: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the sets that are not subsets of another one, each once."""
    return [found for found in dict.fromkeys(sets) if not any(found < other for other in sets)]


def _modes_on(model: Model, lanes: Set[int]) -> list[TaskMode]:
    return [task_mode for task_modes in model.task_modes for task_mode in task_modes if task_mode.mode.lane in lanes]


def _limit_renewables(model: Model) -> bool:
    """Post (4) and its energy; return whether no amount was rounded."""
    problem, is_exact = model.problem, True
    runs: dict[int, cp_model.IntervalVar] = {}
    for resource, capacity in enumerate(problem.capacities):
        demands = [
            [(task_mode, task_mode.mode.demand(resource)) for task_mode in task_modes]
            for task_modes in model.task_modes
        ]
        users = [demand for demand in demands if any(amount for _, amount in demand)]
        holds = [hold for hold in problem.holds if hold.resource == resource and hold.amount]
        amounts = [max(amount for _, amount in demand) for demand in users] + [hold.amount for hold in holds]
        if sum(amounts) <= capacity:
            continue
        unit = math.gcd(*(amount for demand in users for _, amount in demand), *(hold.amount for hold in holds))
        most = _largest_amount(model, len(amounts))
        if capacity // unit > most:
            unit, is_exact = -(-capacity // most), False
        scaled = [[(task_mode, -(-amount // unit)) for task_mode, amount in demand] for demand in users]
        lifetimes = [(_add_lifetime(model, hold), -(-hold.amount // unit)) for hold in holds]
        for demand in users:
            task = demand[0][0].task
            if task not in runs:
                start, duration, end = model.starts[task], model.durations[task], model.ends[task]
                runs[task] = model.cp.new_interval_var(start, duration, end, f"run {task}")
        model.cp.add_cumulative(
            [*(runs[demand[0][0].task] for demand in users), *(lifetime.interval for lifetime, _ in lifetimes)],
            [
                *(_choice(model, demand, f"demand {demand[0][0].task} {resource}") for demand in scaled),
                *(amount for _, amount in lifetimes),
            ],
            capacity // unit,
        )
        energies: list[cp_model.LinearExprT] = [
            amount * task_mode.mode.duration * task_mode.on for demand in scaled for task_mode, amount in demand
        ]
        energies += [amount * lifetime.length for lifetime, amount in lifetimes]
        _bound_energy(model, energies, capacity // unit)
        model.lifetimes += [lifetime for lifetime, _ in lifetimes]
    return is_exact


def _largest_amount(model: Model, count: int) -> int:
    """Return the largest amount for which the sum of `count` amounts x makespan fits into 64 bits."""
    return max(1, min(MAX_AMOUNT, MAX_INTEGER // (max(1, model.horizon) * count)))


def _add_lifetime(model: Model, hold: ResourceHold) -> HoldVariables:
    """Post the lifetime of a hold."""
    cp, ancestors = model.cp, _ancestors(model.problem)
    awaited = [
        task for task in dict.fromkeys((hold.task, *hold.readers)) if not _is_before_any(ancestors, task, hold.readers)
    ]
    last = cp.new_int_var(0, model.horizon, f"last {hold.task}")
    length = cp.new_int_var(0, model.horizon, f"length {hold.task}")
    for task in awaited:
        cp.add(model.ends[task] <= last)
    cp.add(model.starts[hold.task] + length == last)
    interval = cp.new_interval_var(model.starts[hold.task], length, last, f"lifetime {hold.task}")
    return HoldVariables(hold=hold, last=last, length=length, interval=interval)


def _bound_makespan(model: Model) -> None:
    """Post (5)."""
    for end, after in zip(model.ends, model.problem.successors(), strict=True):
        if not after:
            model.cp.add(end <= model.makespan)
    model.cp.minimize(model.makespan)


def _bound_energy(model: Model, energies: Sequence[cp_model.LinearExprT], capacity: int) -> None:
    """Post that the total energy fits into the makespan."""
    model.cp.add(sum(energies) <= capacity * model.makespan)
