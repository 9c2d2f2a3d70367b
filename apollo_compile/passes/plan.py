"""Stage 3: which lane runs every segment, and when.

    (SegmentGraph, CostTable, lanes) -> Plan

Segments become tasks, lanes become sets of atoms (an atom is a set of units that the same lanes share), modes keep
their duration on every lane with their number of units. The planner returns a schedule, this file turns it into a
plan. The serial plan, everything on lane 0 in graph order, is an ordinary candidate: it stands unless the planner's
schedule is shorter by `min_gain`, because running side by side has risks that the model does not see.

Guarantees: dependencies, hand-overs and units hold at every instant; bound <= makespan <= serial; the same inputs give
the same plan. Leaves to others: what runs when predictions are wrong (`select.py`), waits (stage 4), buffers (stage 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from apollo_compile.errors import InvariantError
from apollo_compile.ir import (
    Assignment,
    CostTable,
    Lane,
    LaneId,
    Mode,
    Origin,
    Plan,
    Quota,
    SegmentGraph,
    SegmentId,
)
from apollo_compile.planner import problem as planning
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedule
from apollo_compile.planner.simulate import serial_schedule


def make_plan(
    graph: SegmentGraph,
    costs: CostTable,
    *,
    lanes: tuple[Lane, ...],
    planner: Literal["greedy", "serial"] = "greedy",
    min_gain: float = 0.02,
    seed: int = 0,
    iterations: int = 2000,
) -> Plan:
    """Return the best plan found on `lanes`; lane 0 has every unit.

    `min_gain` is the fraction of the serial makespan that a plan must save. `iterations` are the
    planner's steps of local improvement for 60 segments.
    """
    modes = [_mode_by_lane(graph, costs, lanes, SegmentId(segment)) for segment in range(len(graph.segments))]
    problem = _to_problem(graph, costs, lanes, modes)
    serial = serial_schedule(problem)
    schedule, origin = serial, Origin.SERIAL
    if planner == "greedy":
        found = greedy_schedule(problem, seed=seed, iterations=iterations)
        if found.makespan < serial.makespan and found.makespan <= serial.makespan * (1 - min_gain):
            schedule, origin = found, Origin.GREEDY
    return Plan(
        origin=origin,
        lanes=lanes,
        assignments=tuple(
            Assignment(
                segment=SegmentId(segment),
                lane=LaneId(lane),
                quota=Quota(units=modes[segment][lane].units, memory_bytes=modes[segment][lane].memory_bytes),
                start_ns=start,
                duration_ns=modes[segment][lane].duration_ns,
            )
            for segment, (lane, start) in enumerate(zip(schedule.lanes, schedule.starts, strict=True))
        ),
        makespan_ns=schedule.makespan,
        serial_ns=serial.makespan,
        lower_bound_ns=lower_bound(problem),
    )


def _mode_by_lane(graph: SegmentGraph, costs: CostTable, lanes: Sequence[Lane], segment: SegmentId) -> dict[int, Mode]:
    mode_by_units = {mode.units: mode for mode in costs.modes[segment]}
    found = {lane.id: mode_by_units[len(lane.units)] for lane in lanes if len(lane.units) in mode_by_units}
    if 0 not in found:
        raise InvariantError(
            f"make_plan: segment {segment} ({graph.segments[segment].name}) needs a mode with all "
            f"{len(lanes[0].units)} units of lane 0, its modes have {sorted(mode_by_units)}; "
            "give estimate_costs the profile that the lanes were made for"
        )
    return {int(lane): mode for lane, mode in found.items()}


def _to_problem(
    graph: SegmentGraph, costs: CostTable, lanes: Sequence[Lane], modes: Sequence[dict[int, Mode]]
) -> planning.Problem:
    units_by_owners: dict[tuple[int, ...], int] = {}
    for unit in lanes[0].units:
        owners = tuple(index for index, lane in enumerate(lanes) if unit in lane.units)
        units_by_owners[owners] = units_by_owners.get(owners, 0) + 1
    return planning.Problem(
        tasks=tuple(
            planning.Task(
                modes=tuple(
                    planning.Mode(lane=lane, duration=mode.duration_ns) for lane, mode in modes[segment.id].items()
                ),
                predecessors=graph.predecessors(segment.id),
            )
            for segment in graph.segments
        ),
        lanes=tuple(
            frozenset(atom for atom, owners in enumerate(units_by_owners) if index in owners)
            for index in range(len(lanes))
        ),
        atom_sizes=tuple(units_by_owners.values()),
        handover=costs.handover_ns,
    )
