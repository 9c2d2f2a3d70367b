"""Stage 3: plan which lane runs every segment, and when.

    (SegmentGraph, CostTable, lanes) -> Plan

Segments become tasks, lanes become sets of atoms (an atom is a group of units that belong to the same lanes), and a
mode has the same duration on every lane with its number of units. With a memory quota, a buffer is a hold: its bytes
count from the start of its producer to the end of its last reader, or to the end of the graph if it is an output; the
workspace of a mode counts while it runs. The planner returns a schedule and its predicted execution with interference;
this file turns both into a plan.

Few lanes make the search short, so it uses only the lanes that split the device in two, unless a list schedule on all
lanes beats the lower bound on those few.

The serial plan, everything on lane 0 in graph order, is an ordinary candidate: it is kept unless the planner's schedule
is shorter by `min_gain`, because running segments concurrently has risks that the model does not see. A pinned plan
(read from a file) keeps its lanes and its order; its times come from the current cost table.

Guarantees: dependencies, hand-over times between lanes, units and the memory quota are respected at every instant;
bound <= makespan without interference <= makespan; makespan <= serial unless the plan is pinned; the same inputs give
the same plan unless the search was stopped early.
Leaves wrong predictions to autotuning (`autotune/`), waits to stage 4, releases to stage 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from apollo_compile.errors import InfeasiblePlanError, InvariantError
from apollo_compile.ir import (
    Assignment,
    CostTable,
    Lane,
    LaneId,
    Mode,
    Origin,
    Plan,
    Quota,
    RankedSchedule,
    SegmentGraph,
    SegmentId,
)
from apollo_compile.planner import problem as planning
from apollo_compile.planner.apart import bound_apart, solve_apart
from apollo_compile.planner.greedy import greedy_schedules
from apollo_compile.planner.simulate import Execution, Simulator, execute, serial_schedule
from apollo_compile.planner.solve import Effort, Solution
from apollo_compile.target.lanes import lanes_for_two
from apollo_compile.units import format_bytes


def make_plan(
    graph: SegmentGraph,
    costs: CostTable,
    *,
    lanes: tuple[Lane, ...],
    planner: Literal["cp_sat", "greedy", "serial"] = "cp_sat",
    min_gain: float = 0.02,
    seed: int = 0,
    time_limit_s: float = 2.0,
    work_s: float | None = None,
    memory_quota: int | None = None,
    pinned: Plan | None = None,
) -> Plan:
    """Return the best plan found on `lanes`; lane 0 has every unit.

    Arguments:
        graph: the segments to place.
        costs: modes of every segment.
        lanes: the lane catalogue.
        planner: `greedy` does not run the solver, `serial` does not search at all.
        min_gain: fraction of the serial makespan that a plan must save.
        seed: seed of the planner's random moves and of the solver.
        time_limit_s: seconds after which the search stops with the best plan so far.
        work_s: seconds that the planned amount of search takes; None is half of `time_limit_s`.
        memory_quota: bytes that buffers made by the graph may take at any instant; None is no limit.
        pinned: a plan of this graph on these lanes; its lanes and order are kept.

    Raises:
        InfeasiblePlanError: no plan keeps the memory quota.
    """
    useful = lanes if pinned is not None else lanes_for(graph, costs, lanes, memory_quota=memory_quota)
    problem = to_problem(graph, costs, useful, memory_quota=memory_quota)
    serial = serial_schedule(problem)
    to_plan = partial(_to_plan, graph, costs, lanes, useful, problem)
    if pinned is not None:
        schedule = _follow(pinned, problem)
        return to_plan(schedule, execute(problem, schedule), serial, pinned=pinned)
    if planner == "serial":
        return to_plan(serial, execute(problem, serial), serial)
    effort = Effort(seed=seed, time_limit_s=time_limit_s, work_s=work_s, use_solver=planner == "cp_sat")
    try:
        solution = solve_apart(problem, effort)
    except InfeasiblePlanError as error:
        raise _explain_infeasible(graph, problem, memory_quota) from error
    chosen, execution = solution.schedule, solution.execution
    if execution.makespan > serial.makespan * (1 - min_gain) and problem.is_valid(serial):
        chosen, execution = serial, execute(problem, serial)
    return to_plan(chosen, execution, serial, solution=solution)


def make_serial_plan(graph: SegmentGraph, costs: CostTable, plan: Plan) -> Plan:
    """Return the serial plan, with the bound of `plan`, the planner's result for the same costs."""
    problem = to_problem(graph, costs, plan.lanes)
    schedule = serial_schedule(problem)
    execution = execute(problem, schedule)
    return replace(
        plan,
        origin=Origin.SERIAL,
        assignments=_assign(graph, costs, plan.lanes, problem, schedule, execution),
        makespan_ns=execution.makespan,
        undisturbed_ns=schedule.makespan,
        solver=None,
        memory_quota=None,
        stopped_early=False,
        pinned=False,
    )


def plan_in_order(chosen: Sequence[LaneId], lanes: tuple[Lane, ...]) -> Plan:
    """Return the plan of a program written by hand: segment n runs on lane `chosen[n]`, and begins n-th.

    Only the order counts; its times mean nothing.
    """
    units = {lane.id: len(lane.units) for lane in lanes}
    return Plan(
        origin=Origin.SERIAL,
        lanes=lanes,
        assignments=tuple(
            Assignment(
                segment=SegmentId(number),
                lane=lane,
                quota=Quota(units=units[lane], memory_bytes=0),
                start_ns=number,
                duration_ns=1,
            )
            for number, lane in enumerate(chosen)
        ),
        makespan_ns=len(chosen),
        undisturbed_ns=len(chosen),
        serial_ns=len(chosen),
        lower_bound_ns=0,
    )


def estimate_makespan(graph: SegmentGraph, costs: CostTable, lanes: tuple[Lane, ...]) -> int:
    """Return the makespan in ns of the best list schedule, an estimate without a search."""
    few = lanes_for_two(lanes)
    problems = (to_problem(graph, costs, each) for each in dict.fromkeys((few, lanes)))
    return min(execute(problem, each).makespan for problem in problems for each in greedy_schedules(problem))


def lanes_for(
    graph: SegmentGraph, costs: CostTable, lanes: tuple[Lane, ...], *, memory_quota: int | None = None
) -> tuple[Lane, ...]:
    """Return the lanes to search a plan on, lane 0 first; see the top of this file."""
    few = lanes_for_two(lanes)
    if few == lanes:
        return few
    problem = to_problem(graph, costs, lanes, memory_quota=memory_quota)
    listed = (each for each in greedy_schedules(problem) if not any(problem.resource_violations(each)))
    bound = bound_apart(to_problem(graph, costs, few, memory_quota=memory_quota))
    return lanes if min((execute(problem, each).makespan for each in listed), default=bound) < bound else few


def to_problem(
    graph: SegmentGraph, costs: CostTable, lanes: Sequence[Lane], *, memory_quota: int | None = None
) -> planning.Problem:
    """Return the planning problem of a graph.

    Its lanes are numbered by their position in `lanes`; the first has every unit, and the reference modes run on it.
    """
    units_by_owners: dict[tuple[int, ...], int] = {}
    for unit in lanes[0].units:
        owners = tuple(index for index, lane in enumerate(lanes) if unit in lane.units)
        units_by_owners[owners] = units_by_owners.get(owners, 0) + 1
    limits_memory = memory_quota is not None

    def task_mode(segment: SegmentId, lane: int, mode: Mode) -> planning.ExecutionMode:
        outputs = sum(graph.buffers[buffer].num_bytes for buffer in graph.segments[segment].outputs)
        return planning.ExecutionMode(
            lane=lane,
            duration=mode.duration_ns,
            demands=(max(0, mode.memory_bytes - outputs),) if limits_memory else (),
            memory_share=mode.memory_share,
        )

    tasks = []
    for segment in graph.segments:
        modes = _mode_by_place(graph, costs, lanes, segment.id)
        tasks.append(
            planning.Task(
                modes=tuple(task_mode(segment.id, lane, mode) for lane, mode in modes.items()),
                predecessors=graph.predecessors(segment.id),
            )
        )
    return planning.Problem(
        tasks=tuple(tasks),
        lanes=tuple(
            frozenset(atom for atom, owners in enumerate(units_by_owners) if index in owners)
            for index in range(len(lanes))
        ),
        atom_sizes=tuple(units_by_owners.values()),
        handover=costs.handover_ns,
        capacities=() if memory_quota is None else (memory_quota,),
        holds=_holds(graph) if limits_memory else (),
        interference=planning.Interference(slowdown=costs.slowdown),
    )


def _mode_by_place(graph: SegmentGraph, costs: CostTable, lanes: Sequence[Lane], segment: SegmentId) -> dict[int, Mode]:
    mode_by_units = {mode.units: mode for mode in costs.modes[segment]}
    units = [len(lane.units) for lane in lanes]
    found = {place: mode_by_units[count] for place, count in enumerate(units) if count in mode_by_units}
    if 0 not in found:
        raise InvariantError(
            f"make_plan: segment {segment} ({graph.segments[segment].name}) needs a mode with all "
            f"{units[0]} units of lane 0, its modes have {sorted(mode_by_units)}; "
            "give estimate_costs the profile that the lanes were made for"
        )
    return found


def _holds(graph: SegmentGraph) -> tuple[planning.ResourceHold, ...]:
    is_read = {other for segment in graph.segments for other in graph.predecessors(segment.id)}
    last = [segment.id for segment in graph.segments if segment.id not in is_read]
    holds = []
    for buffer in graph.buffers:
        if buffer.producer is not None:
            readers = {*buffer.readers, *(last if buffer.is_output else ())} - {buffer.producer}
            holds.append(
                planning.ResourceHold(
                    resource=0, amount=buffer.num_bytes, task=buffer.producer, readers=tuple(sorted(readers))
                )
            )
    return tuple(holds)


def _to_plan(
    graph: SegmentGraph,
    costs: CostTable,
    lanes: tuple[Lane, ...],
    useful: tuple[Lane, ...],
    problem: planning.Problem,
    schedule: planning.TaskSchedule,
    execution: Execution,
    serial: planning.TaskSchedule,
    *,
    solution: Solution | None = None,
    pinned: Plan | None = None,
) -> Plan:
    return Plan(
        origin=pinned.origin if pinned else _origin(schedule, serial, solution),
        lanes=lanes,
        assignments=_assign(graph, costs, useful, problem, schedule, execution),
        makespan_ns=execution.makespan,
        undisturbed_ns=schedule.makespan,
        serial_ns=serial.makespan,
        lower_bound_ns=solution.bound if solution else bound_apart(problem),
        candidates=()
        if solution is None
        else tuple(
            RankedSchedule(name=found.name, undisturbed_ns=found.makespan, makespan_ns=found.executed)
            for found in solution.candidates
        ),
        seed=solution.seed if solution else (pinned.seed if pinned else 0),
        solver=solution.solver if solution else (pinned.solver if pinned else None),
        memory_quota=problem.capacities[0] if problem.capacities else None,
        stopped_early=solution.stopped_early if solution else False,
        pinned=pinned is not None,
    )


def _assign(
    graph: SegmentGraph,
    costs: CostTable,
    lanes: tuple[Lane, ...],
    problem: planning.Problem,
    schedule: planning.TaskSchedule,
    execution: Execution,
) -> tuple[Assignment, ...]:
    assignments = []
    for segment, (start, end) in enumerate(zip(execution.starts, execution.ends, strict=True)):
        place = problem.mode(schedule, segment).lane
        mode = _mode_by_place(graph, costs, lanes, SegmentId(segment))[place]
        assignments.append(
            Assignment(
                segment=SegmentId(segment),
                lane=lanes[place].id,
                quota=Quota(units=mode.units, memory_bytes=mode.memory_bytes),
                start_ns=start,
                duration_ns=end - start,
            )
        )
    return tuple(assignments)


def _origin(schedule: planning.TaskSchedule, serial: planning.TaskSchedule, solution: Solution | None) -> Origin:
    if solution is None or (schedule.modes, schedule.starts) == (serial.modes, serial.starts):
        return Origin.SERIAL
    if solution.proof == "bound":
        return Origin.OPTIMAL
    return Origin.FEASIBLE if solution.is_from_solver else Origin.GREEDY


def _follow(pinned: Plan, problem: planning.Problem) -> planning.TaskSchedule:
    """Return the schedule of `problem` with the lanes and the order of a pinned plan."""
    mode_by_lane = [{mode.lane: index for index, mode in enumerate(task.modes)} for task in problem.tasks]
    modes = [mode_by_lane[assignment.segment][assignment.lane] for assignment in pinned.assignments]
    return Simulator(problem).replay([assignment.segment for assignment in pinned.in_start_order()], modes)


def _explain_infeasible(
    graph: SegmentGraph, problem: planning.Problem, memory_quota: int | None
) -> InfeasiblePlanError:
    if memory_quota is None:
        raise InvariantError(f"make_plan: no plan for {graph.name} without a memory quota; the serial plan is one")
    needed = [
        problem.held(number, 0) + min(mode.demand(0) for mode in task.modes)
        for number, task in enumerate(problem.tasks)
    ]
    largest = max(range(len(needed)), key=needed.__getitem__)
    peak = problem.peak(serial_schedule(problem), 0)
    return InfeasiblePlanError(
        f"no plan for {graph.name} fits {format_bytes(memory_quota)}: in graph order it takes {format_bytes(peak)}, "
        f"and segment {largest} ({graph.segments[largest].name}) alone makes {format_bytes(needed[largest])}; raise "
        f"'plan.memory_quota' to {peak} bytes"
    )
