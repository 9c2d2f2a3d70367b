"""Constraint programming: search for a shortest schedule with CP-SAT.

    solve_with_cp_sat(problem, hint=..., ...) -> SolverOutcome
    search_part(problem, makespans, limits, ...) -> Answer                  one window of `windows.py`

The model states `problem.py` with the same numbers. on[t, m] is a literal, s[t, m] the start of t in mode m, lane[t, l]
the sum of on[t, m] over the modes on lane l, C the makespan:

(1) one mode       exactly one on[t, m];  on[t, m] => s[t, m] = start[t];
                   end[t] = start[t] + sum_m duration[t, m] * on[t, m]                      -> _add_task
(2) precedence     end[p] <= start[t];
                   on[t, m] => end[p] + handover * (1 - lane[p, lane of m]) <= s[t, m]      -> _order_tasks
(3) atoms          per atom: runs of the modes whose lane covers it do not overlap          -> _separate_on_atoms
    hand-over      per lane and atom of it, see Note [keep warm]                            -> _keep_lanes_apart
(4) renewable      per resource, one cumulative of runs, which ask for
                   sum_m demand[t, m] * on[t, m], and of the lifetimes of holds             -> _limit_renewables
    lifetime       [start[t], last],  last >= end of t and of every reader                  -> _add_lifetime
(5) non-renewable  sum of consumption[t, m] * on[t, m] <= budget                            -> _limit_budgets
(6) objective      minimise C,  lower_bound <= C <= makespan of the hint,  end[t] <= C      -> _bound_makespan
    energy         sum of amount * duration <= capacity * C, which (3) and (4) imply        -> _bound_energy

Every mode has its OWN start and optional interval. With optional intervals that share the start and end of their task,
CP-SAT 9.15 reports optima that are none and calls feasible problems infeasible (models in tests/planner/cpsat_repro).
Where there are no atoms nothing tells modes apart in time, and one interval per task, of variable length, does.
A status is therefore a claim of the solver: schedules are checked here with `Problem.violations`, and a certificate is
a valid schedule as long as our own bound (`bounds.py`).

Note [keep warm]. A lane keeps its atoms warm for `handover` after each run. Other lanes may not run on a warm atom; the
lane itself may. Per lane l and atom a of l, a cumulative of capacity K, the number of tasks with a mode on l, holds

    runs on l, longer by handover         demand 1
    runs on other lanes that cover a      demand K

Runs of l are at most K, so they never exclude each other; one of another lane excludes all of them. For i on l and j on
another lane that meets l in a: the posted constraint of l says that j is not within [start[i], end[i] + handover), that
of the lane of j says the same with i and j exchanged, and together that is (3). Exact, with one interval per mode more.

Reductions before, which keep a shortest schedule: modes that no schedule can have (their demand exceeds a capacity, or
their consumption with the least of all others a budget) and modes that another one dominates (same lane, not longer,
asks for no more of anything that can run short) go; budgets that cannot be exceeded go. A hint in a dominated mode
moves to the one that dominates. A reader before another reader of a hold goes. Amounts are divided by their common
divisor; if they are still larger than `MAX_AMOUNT` they are rounded, demands up and capacities down. The model is then
narrower than the problem, and neither its optimum nor its infeasibility is reported as a proof.
Source: Sprecher, Hartmann, Drexl, "An exact algorithm for project scheduling with multiple modes", OR Spektrum 19,
1997, https://doi.org/10.1007/BF01545587 (modes that go).

Deterministic with one worker: the same problem, hint, seed and deterministic time give the same schedule, unless the
time limit struck, which the outcome says. With several, the time that a search takes is luck: on one published instance
half of the seeds end within 2 s, the others not within 10. So after `RESTART_S` another seed continues, and others
again and again, each with as much time as all before it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

from ortools.sat.python import cp_model

from apollo_compile.errors import InvariantError
from apollo_compile.planner.problem import Hold, Mode, Problem, Schedule
from apollo_compile.planner.replay import left_shifted, makespan_of

logger = logging.getLogger(__name__)

MAX_AMOUNT = 1_000_000
"""Capacities above are rounded: times them, a makespan in nanoseconds must fit into 64 bits."""
MAX_INTEGER = 1 << 60
COMPLETE_SUBSOLVER = "reduced_costs"
"""With several workers, the search beside the neighbourhoods: of those tried the best on published instances."""

RESTART_S = 3.0
"""With several workers, the time after which a search begins again with another seed for the first time."""

Status = Literal["optimal", "feasible", "unknown", "infeasible", "invalid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverOutcome:
    """What CP-SAT says, and the schedule it found, which is valid."""

    status: Status
    """ "optimal": it claims that nothing is shorter. "invalid": what it found breaks a constraint, and was dropped."""
    schedule: Schedule | None
    bound: int
    """No schedule is shorter, as CP-SAT claims; at least the `lower_bound` that it was given."""
    reached_time_limit: bool
    """Whether the time limit ended the search, so that another run may find something else."""


def solver_version() -> str:
    """Return the name and version of the solver."""
    return f"OR-tools CP-SAT {version('ortools')}"


def solve_with_cp_sat(
    problem: Problem,
    *,
    hint: Schedule | None,
    lower_bound: int,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
    workers: int = 1,
) -> SolverOutcome:
    """Search for a shortest schedule, one that is not longer than the hint.

    Arguments:
        problem: what to schedule.
        hint: a valid schedule where the search begins; None if none is known.
        lower_bound: proven elsewhere; 0 if nothing is known.
        seed: of the search.
        deterministic_time: what CP-SAT may spend, in its own measure of work; may be infinite.
        time_limit_s: safety net.
        workers: threads; with more than one, results vary from run to run.

    Raises:
        InvariantError: the hint is not valid or shorter than the lower bound, or the model is malformed.
    """
    deadline = time.monotonic() + time_limit_s
    if hint is not None:
        check_start(problem, hint, lower_bound)
        if hint.makespan == lower_bound:
            return SolverOutcome(status="optimal", schedule=hint, bound=lower_bound, reached_time_limit=False)
    if not problem.tasks:
        nothing = Schedule(modes=(), starts=(), makespan=0)
        return SolverOutcome(status="optimal", schedule=nothing, bound=0, reached_time_limit=False)
    kept = _kept_modes(problem)
    longest = hint.makespan if hint is not None else _longest(problem, kept) if all(kept) else -1
    if lower_bound > longest:
        return SolverOutcome(status="infeasible", schedule=None, bound=lower_bound, reached_time_limit=False)
    model = _Model(problem, kept, (lower_bound, longest))
    is_exact = _post(model)
    if hint is not None:
        _add_hint(model, hint)
    left_s = deadline - time.monotonic()
    if left_s <= 0:  # CP-SAT calls a model with a negative limit invalid
        return SolverOutcome(status="unknown", schedule=None, bound=lower_bound, reached_time_limit=True)
    search = _search if workers == 1 else _search_with_restarts
    answer = search(model, seed=seed, deterministic_time=deterministic_time, time_limit_s=left_s, workers=workers)
    return _judge(problem, answer, is_exact, lower_bound)


def search_part(
    problem: Problem,
    makespans: tuple[int, int],
    limits: Sequence[Sequence[tuple[int, int]]],
    *,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
) -> Answer:
    """Search for a schedule of some tasks of a larger problem.

    Arguments:
        problem: those tasks, and what the others leave to them.
        makespans: the least and the largest one, of all tasks.
        limits: release and tail of every task and mode; see `_Variant`.
        seed: of the search.
        deterministic_time: what CP-SAT may spend, in its own measure of work.
        time_limit_s: safety net.
    """
    model = _Model(problem, _kept_modes(problem), makespans, limits)
    _post(model)
    return _search(model, seed=seed, deterministic_time=deterministic_time, time_limit_s=time_limit_s, presolves=1)


def check_start(problem: Problem, start: Schedule, lower_bound: int) -> None:
    """Raise `InvariantError` if a schedule is not valid, or shorter than the bound."""
    violations = problem.violations(start)
    if violations:
        raise InvariantError(f"the schedule that CP-SAT is to improve is not valid: {violations[0]}")
    if start.makespan < lower_bound:
        raise InvariantError(f"a schedule of {start.makespan} is shorter than the lower bound {lower_bound}")


def _judge(problem: Problem, answer: Answer, is_exact: bool, lower_bound: int) -> SolverOutcome:
    """Return what the answer means for the problem, after a check of the schedule."""
    status: Status = answer.status
    bound, schedule = max(lower_bound, answer.bound), None
    if answer.starts:
        makespan = makespan_of(problem, answer.starts, answer.modes)
        schedule = Schedule(modes=answer.modes, starts=answer.starts, makespan=makespan)
        violations = problem.violations(schedule)
        if violations:
            logger.warning("schedule of CP-SAT dropped, it breaks a constraint: %s", violations[0])
            return SolverOutcome(
                status="invalid", schedule=None, bound=lower_bound, reached_time_limit=answer.reached_time_limit
            )
        schedule = left_shifted(problem, answer.starts, answer.modes)
    if not is_exact:  # nothing is claimed of the problem
        bound = lower_bound
        status = "feasible" if status == "optimal" else "unknown" if status == "infeasible" else status
    if schedule is not None and schedule.makespan < bound:
        logger.warning("CP-SAT claimed that nothing is shorter than %d, but %d is", bound, schedule.makespan)
        status, bound = "feasible", lower_bound
    return SolverOutcome(status=status, schedule=schedule, bound=bound, reached_time_limit=answer.reached_time_limit)


# ----------------------------------------------------------------------------------------------------- reductions


def _kept_modes(problem: Problem) -> list[list[int]]:
    """Return, per task, the modes that a shortest schedule may need; a task with none has no schedule."""
    kept = [list(range(len(task.modes))) for task in problem.tasks]
    while all(kept):
        scarce = _scarce_budgets(problem, kept)
        possible = _possible_modes(problem, kept)
        smaller = [
            [mode for mode in modes if not _is_dominated(problem, task, mode, modes, scarce)]
            for task, modes in enumerate(possible)
        ]
        if smaller == kept:
            break
        kept = smaller
    return kept


def _possible_modes(problem: Problem, kept: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the modes that fit the capacities, and the budgets with some choice for all other tasks."""
    possible = [
        [
            mode
            for mode in modes
            if all(_demand(problem, task, mode, resource) <= limit for resource, limit in enumerate(problem.capacities))
        ]
        for task, modes in enumerate(kept)
    ]
    for resource, budget in enumerate(problem.budgets):
        least = [
            min(consumption_of(problem, task, mode, resource) for mode in modes) for task, modes in enumerate(kept)
        ]
        spare = budget - sum(least)
        possible = [
            [mode for mode in modes if consumption_of(problem, task, mode, resource) <= spare + least[task]]
            for task, modes in enumerate(possible)
        ]
    return possible


def _scarce_budgets(problem: Problem, kept: Sequence[Sequence[int]]) -> list[int]:
    """Return the non-renewable resources of which some choice of modes consumes too much."""
    return [
        resource
        for resource, budget in enumerate(problem.budgets)
        if budget
        < sum(max(consumption_of(problem, task, mode, resource) for mode in modes) for task, modes in enumerate(kept))
    ]


def _is_dominated(problem: Problem, task: int, mode: int, others: Sequence[int], scarce: Sequence[int]) -> bool:
    """Return whether another mode is better, or as good and before it."""
    return any(
        _is_as_good(problem, task, other, mode, scarce)
        and (other < mode or not _is_as_good(problem, task, mode, other, scarce))
        for other in others
        if other != mode
    )


def _is_as_good(problem: Problem, task: int, mode: int, other: int, scarce: Sequence[int]) -> bool:
    """Return whether the mode can take the place of the other one in every schedule."""
    own, replaced = problem.tasks[task].modes[mode], problem.tasks[task].modes[other]
    return (
        own.lane == replaced.lane
        and own.duration <= replaced.duration
        and all(
            _demand(problem, task, mode, resource) <= _demand(problem, task, other, resource)
            for resource in range(len(problem.capacities))
        )
        and all(
            consumption_of(problem, task, mode, resource) <= consumption_of(problem, task, other, resource)
            for resource in scarce
        )
    )


def _demand(problem: Problem, task: int, mode: int, resource: int) -> int:
    demands = problem.tasks[task].modes[mode].demands
    return demands[resource] if demands else 0


def consumption_of(problem: Problem, task: int, mode: int, resource: int) -> int:
    """Return what a mode takes of a budget."""
    consumption = problem.tasks[task].modes[mode].consumption
    return consumption[resource] if consumption else 0


def _longest(problem: Problem, kept: Sequence[Sequence[int]]) -> int:
    """Return what no shortest schedule exceeds: one has no instant at which nothing runs and nothing is handed over."""
    slowest = (max(problem.tasks[task].modes[mode].duration for mode in modes) for task, modes in enumerate(kept))
    return sum(slowest) + problem.handover * max(0, len(kept) - 1)


def _post(model: _Model) -> bool:
    """Post all constraints; return whether the model says no more than the problem does."""
    _order_tasks(model)
    _separate_on_atoms(model)
    _keep_lanes_apart(model)
    is_exact = _limit_renewables(model)
    _limit_budgets(model)
    _bound_makespan(model)
    return is_exact


# ---------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    """One mode of a task in the model."""

    task: int
    index: int
    mode: Mode
    on: cp_model.BoolVarT
    start: cp_model.IntVar
    """Its own, if the task has several modes and there are atoms; the task's otherwise."""
    release: int
    """Earliest start."""
    tail: int
    """Least time from the end of the task to the end of all, in this mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lifetime:
    """A hold in the model."""

    hold: Hold
    last: cp_model.IntVar
    length: cp_model.IntVar
    interval: cp_model.IntervalVar


class _Model:
    """A model under construction: per task its start, end and variants."""

    def __init__(
        self,
        problem: Problem,
        kept: Sequence[Sequence[int]],
        makespans: tuple[int, int],
        limits: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """Begin a model.

        Arguments:
            problem: what to schedule.
            kept: modes of every task.
            makespans: the least and the largest one.
            limits: release and tail of every task and mode; None if all are 0.
        """
        self.problem = problem
        self.horizon = makespans[1]
        self.cp = cp_model.CpModel()
        self.makespan = self.cp.new_int_var(*makespans, "makespan")
        self.starts: list[cp_model.IntVar] = []
        self.ends: list[cp_model.IntVar] = []
        self.durations: list[cp_model.IntVar | int] = []
        self.variants: list[list[_Variant]] = []
        self.runs: dict[tuple[int, int], cp_model.IntervalVar] = {}
        """Per task and mode, the optional interval in which it uses its atoms; empty if there are none."""
        self.choices: list[tuple[cp_model.IntVar, list[tuple[_Variant, int]]]] = []
        """Variables whose value depends on the mode, with their values."""
        self.lifetimes: list[_Lifetime] = []
        for task, modes in enumerate(kept):
            _add_task(self, [(mode, *(limits[task][mode] if limits else (0, 0))) for mode in modes])

    def on_lane(self, task: int, lane: int) -> list[cp_model.BoolVarT]:
        """Return the literals of which one is true if the task is on the lane."""
        return [variant.on for variant in self.variants[task] if variant.mode.lane == lane]


def _add_task(model: _Model, modes: Sequence[tuple[int, int, int]]) -> None:
    """Post (1) for the next task: mode, release and tail of each."""
    cp, horizon, task = model.cp, model.horizon, len(model.variants)
    start = cp.new_int_var(min(release for _, release, _ in modes), horizon, f"start {task}")
    has_own_starts = len(modes) > 1 and bool(model.problem.atom_sizes)
    variants = [
        _Variant(
            task=task,
            index=index,
            mode=model.problem.tasks[task].modes[index],
            on=cp.new_bool_var(f"on {task} {index}"),
            start=cp.new_int_var(release, horizon, f"start {task} {index}") if has_own_starts else start,
            release=release,
            tail=tail,
        )
        for index, release, tail in modes
    ]
    cp.add_exactly_one([variant.on for variant in variants])
    duration = _choice(model, [(variant, variant.mode.duration) for variant in variants], f"duration {task}")
    end = cp.new_int_var(0, horizon, f"end {task}")
    cp.add(end == start + duration)
    for variant in variants if model.problem.atom_sizes else ():
        length = variant.mode.duration
        cp.add(variant.start == start).only_enforce_if(variant.on)
        cp.add(end == variant.start + length).only_enforce_if(variant.on)
        run = cp.new_optional_fixed_size_interval_var(variant.start, length, variant.on, f"run {task} {variant.index}")
        model.runs[task, variant.index] = run
    model.starts.append(start)
    model.durations.append(duration)
    model.ends.append(end)
    model.variants.append(variants)


def _choice(model: _Model, amounts: list[tuple[_Variant, int]], name: str) -> cp_model.IntVar | int:
    """Return the amount of the variant that is on."""
    values = sorted({amount for _, amount in amounts})
    if len(values) == 1:
        return values[0]
    chosen = model.cp.new_int_var_from_domain(cp_model.Domain.from_values(values), name)
    model.cp.add(chosen == sum(amount * variant.on for variant, amount in amounts))
    for variant, amount in amounts:
        model.cp.add(chosen == amount).only_enforce_if(variant.on)
    model.choices.append((chosen, amounts))
    return chosen


def _order_tasks(model: _Model) -> None:
    """Post (2). An edge beside a longer path is implied, hand-over included: on the path the lane changes once, too."""
    cp, handover = model.cp, model.problem.handover
    for task, predecessors in enumerate(_direct_predecessors(model.problem)):
        for other in predecessors:
            cp.add(model.ends[other] <= model.starts[task])
            for variant in model.variants[task] if handover else ():
                same = model.on_lane(other, variant.mode.lane)
                if len(same) < len(model.variants[other]):
                    cp.add(model.ends[other] + handover * (1 - sum(same)) <= variant.start).only_enforce_if(variant.on)


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


def _separate_on_atoms(model: _Model) -> None:
    """Post (3) without hand-over."""
    for lanes in _largest(_lanes_by_atom(model)):
        variants = _variants_on(model, lanes)
        model.cp.add_no_overlap([model.runs[variant.task, variant.index] for variant in variants])
        _bound_energy(model, [variant.mode.duration * variant.on for variant in variants], 1)


def _keep_lanes_apart(model: _Model) -> None:
    """Post the hand-over of (3); see Note [keep warm]."""
    cp, handover = model.cp, model.problem.handover
    for lane in range(len(model.problem.lanes)) if handover else ():
        own = _variants_on(model, {lane})
        warm = [
            cp.new_optional_fixed_size_interval_var(
                variant.start,
                variant.mode.duration + handover,
                variant.on,
                f"warm {variant.task} {variant.index}",
            )
            for variant in own
        ]
        for others in _largest([lanes - {lane} for lanes in _lanes_by_atom(model) if lane in lanes]):
            runs = [model.runs[variant.task, variant.index] for variant in _variants_on(model, others)]
            if warm and runs:
                demands = [1] * len(warm) + [len(warm)] * len(runs)
                cp.add_cumulative([*warm, *runs], demands, len(warm))


def _lanes_by_atom(model: _Model) -> list[frozenset[int]]:
    """Return the lanes that cover each atom."""
    problem = model.problem
    return [
        frozenset(lane for lane, atoms in enumerate(problem.lanes) if atom in atoms)
        for atom in range(len(problem.atom_sizes))
    ]


def _largest(sets: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the sets that are not in another one, each once."""
    return [found for found in dict.fromkeys(sets) if not any(found < other for other in sets)]


def _variants_on(model: _Model, lanes: Set[int]) -> list[_Variant]:
    return [variant for variants in model.variants for variant in variants if variant.mode.lane in lanes]


def _limit_renewables(model: _Model) -> bool:
    """Post (4) and its energy; return whether no amount was rounded."""
    problem, is_exact = model.problem, True
    runs: dict[int, cp_model.IntervalVar] = {}
    for resource, capacity in enumerate(problem.capacities):
        demands = [
            [(variant, _demand(problem, variant.task, variant.index, resource)) for variant in variants]
            for variants in model.variants
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
        scaled = [[(variant, -(-amount // unit)) for variant, amount in demand] for demand in users]
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
            amount * variant.mode.duration * variant.on for demand in scaled for variant, amount in demand
        ]
        energies += [amount * lifetime.length for lifetime, amount in lifetimes]
        _bound_energy(model, energies, capacity // unit)
        model.lifetimes += [lifetime for lifetime, _ in lifetimes]
    return is_exact


def _largest_amount(model: _Model, count: int) -> int:
    """Return what an amount may be so that `count` of them, each times the makespan, sum up to 64 bits."""
    return max(1, min(MAX_AMOUNT, MAX_INTEGER // (max(1, model.horizon) * count)))


def _add_lifetime(model: _Model, hold: Hold) -> _Lifetime:
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
    return _Lifetime(hold=hold, last=last, length=length, interval=interval)


def _limit_budgets(model: _Model) -> None:
    """Post (5)."""
    kept = [[variant.index for variant in variants] for variants in model.variants]
    for resource in _scarce_budgets(model.problem, kept):
        consumed = [
            consumption_of(model.problem, task, variant.index, resource) * variant.on
            for task, variants in enumerate(model.variants)
            for variant in variants
        ]
        model.cp.add(sum(consumed) <= model.problem.budgets[resource])


def _bound_makespan(model: _Model) -> None:
    """Post (6)."""
    for variants, end, after in zip(model.variants, model.ends, model.problem.successors(), strict=True):
        tails = [variant.tail * variant.on for variant in variants if variant.tail]
        if tails or not after:
            model.cp.add(end + sum(tails) <= model.makespan)
    model.cp.minimize(model.makespan)


def _bound_energy(model: _Model, energies: Sequence[cp_model.LinearExprT], capacity: int) -> None:
    """Say that what is used over time fits between the first release and the last tail."""
    variants = [variant for variants in model.variants for variant in variants]
    outside = min(variant.release for variant in variants) + min(variant.tail for variant in variants)
    model.cp.add(sum(energies) <= capacity * (model.makespan - outside))


def _add_hint(model: _Model, schedule: Schedule) -> None:
    """Hint every variable; a mode that is not in the model moves to one that is as good."""
    cp, problem = model.cp, model.problem
    kept = [[variant.index for variant in variants] for variants in model.variants]
    scarce = _scarce_budgets(problem, kept)
    ends: list[int] = []
    modes: list[int] = []
    for task, variants in enumerate(model.variants):
        start, chosen = schedule.starts[task], schedule.modes[task]
        if chosen not in kept[task]:
            chosen = next(mode for mode in kept[task] if _is_as_good(problem, task, mode, chosen, scarce))
        ends.append(start + problem.tasks[task].modes[chosen].duration)
        cp.add_hint(model.starts[task], start)
        for variant in variants:
            cp.add_hint(variant.on, variant.index == chosen)
        cp.add_hint(model.ends[task], ends[-1])
        for variant in variants:
            if variant.start is not model.starts[task]:
                cp.add_hint(variant.start, start)
        modes.append(chosen)
    for variable, amounts in model.choices:
        cp.add_hint(variable, next(amount for variant, amount in amounts if variant.index == modes[variant.task]))
    for lifetime in model.lifetimes:
        last = max(ends[task] for task in (lifetime.hold.task, *lifetime.hold.readers))
        cp.add_hint(lifetime.last, last)
        cp.add_hint(lifetime.length, last - schedule.starts[lifetime.hold.task])
    cp.add_hint(model.makespan, max(ends))


# --------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What CP-SAT says of a model."""

    status: Literal["optimal", "feasible", "unknown", "infeasible"]
    starts: tuple[int, ...]
    modes: tuple[int, ...]
    """Both empty if it found nothing."""
    bound: int
    deterministic_time: float
    reached_time_limit: bool


def _search(
    model: _Model,
    *,
    seed: int,
    deterministic_time: float,
    time_limit_s: float,
    workers: int = 1,
    presolves: int = 3,
) -> Answer:
    """Run CP-SAT; a small model is not worth many rounds of presolve."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = workers
    parameters.random_seed = seed
    parameters.max_deterministic_time = deterministic_time
    parameters.max_time_in_seconds = time_limit_s
    parameters.max_presolve_iterations = presolves
    parameters.catch_sigint_signal = False  # an interrupt is Python's to handle
    if workers > 1:
        parameters.subsolvers.append(COMPLETE_SUBSOLVER)
    status = solver.solve(model.cp)
    if status == cp_model.MODEL_INVALID:
        raise InvariantError(f"CP-SAT refuses the planner's model: {model.cp.validate()}")
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = solver.best_objective_bound
    return Answer(
        status=_STATUSES[status],
        starts=tuple(solver.value(start) for start in model.starts) if is_found else (),
        modes=tuple(_chosen(solver, variants) for variants in model.variants) if is_found else (),
        bound=round(bound) if math.isfinite(bound) else 0,
        deterministic_time=solver.deterministic_time,
        reached_time_limit=solver.wall_time >= time_limit_s,
    )


def _search_with_restarts(
    model: _Model, *, seed: int, deterministic_time: float, time_limit_s: float, workers: int
) -> Answer:
    """Run CP-SAT with one seed after the other, each from what is known, until one is sure or time is over."""
    begin = time.monotonic()
    answer: Answer | None = None
    spent, bound = 0.0, 0
    for later_seed in itertools.count(seed):
        passed_s = time.monotonic() - begin
        later = _search(
            model,
            seed=later_seed,
            deterministic_time=deterministic_time - spent,
            time_limit_s=min(max(RESTART_S, passed_s), max(0.0, time_limit_s - passed_s)),
            workers=workers,
        )
        spent += later.deterministic_time
        bound = max(bound, later.bound)
        if (
            answer is None
            or not answer.starts
            or (later.starts and _makespan(model, later) <= _makespan(model, answer))
        ):
            answer = later
        is_over = time.monotonic() - begin >= time_limit_s
        if later.status in ("optimal", "infeasible") or spent >= deterministic_time or is_over:
            return replace(answer, bound=bound, deterministic_time=spent, reached_time_limit=is_over)
        if answer.starts:
            model.cp.clear_hints()  # type: ignore[no-untyped-call]
            _add_hint(model, Schedule(modes=answer.modes, starts=answer.starts, makespan=_makespan(model, answer)))
        model.cp.add(model.makespan >= bound)
    raise AssertionError  # the count has no end


def _makespan(model: _Model, answer: Answer) -> int:
    return makespan_of(model.problem, answer.starts, answer.modes)


_STATUSES: dict[cp_model.CpSolverStatus, Literal["optimal", "feasible", "unknown", "infeasible"]] = {
    cp_model.OPTIMAL: "optimal",
    cp_model.FEASIBLE: "feasible",
    cp_model.UNKNOWN: "unknown",
    cp_model.INFEASIBLE: "infeasible",
}


def _chosen(solver: cp_model.CpSolver, variants: Sequence[_Variant]) -> int:
    return next(variant.index for variant in variants if solver.boolean_value(variant.on))
