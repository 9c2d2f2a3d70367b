"""Is a product legal? One check per product; each raises `InvariantError` if not.

    check_x(product, what it was made from) -> None

A check recomputes what it needs by other means than the stage: the stages use vector clocks, the checks use sets of
predecessors; the last check executes the program symbolically. A failed check is a defect of ours, never the user's, so
the message says which product, what was expected and found, where, and that it should be reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NoReturn

from apollo_compile.errors import InvariantError
from apollo_compile.ir import (
    BufferId,
    Capture,
    CostTable,
    Dependency,
    EventId,
    Launch,
    MemoryPlan,
    NodeId,
    NodeKind,
    Partition,
    Plan,
    Program,
    Record,
    Release,
    SegmentGraph,
    SegmentId,
    SyncPlan,
    Wait,
)

_PLACED = (NodeKind.COMPUTE, NodeKind.PROJECTION)
"""Kinds of nodes that belong to exactly one segment."""


def _fail(product: str, found: str, where: str) -> NoReturn:
    raise InvariantError(
        f"{product} is not legal: {found}; at {where}; this is a defect of apollo_compile, please report it"
    )


# ------------------------------------------------------------------------------------------------ stages 0 and 1


def check_capture(capture: Capture) -> None:
    """Check ids, order and references: every node reads, and comes after, earlier nodes only."""
    where = f"graph {capture.name}"
    for index, node in enumerate(capture.nodes):
        if node.id != index:
            _fail("capture", f"expected id {index}, got {node.id}", f"{where}, node {node.name}")
        for kind, others in (("reads", node.inputs), ("is sized by", node.sizes), ("comes after", node.after)):
            if wrong := [other for other in others if not 0 <= other < index]:
                _fail(
                    "capture",
                    f"a node {kind} earlier nodes only, this one {kind} {wrong}",
                    f"{where}, node {index} ({node.name})",
                )
        if list(node.inputs) != sorted(set(node.inputs)):
            _fail(
                "capture",
                f"inputs must ascend without repeats, got {node.inputs}",
                f"{where}, node {index} ({node.name})",
            )
        if wrong_sizes := [other for other in node.sizes if capture.nodes[other].kind is not NodeKind.INPUT]:
            found = f"sizes are graph inputs, these are not: {wrong_sizes}"
            _fail("capture", found, f"{where}, node {index} ({node.name})")
        if node.kind is NodeKind.INPUT and (node.inputs or node.after or node.sizes):
            _fail("capture", "a graph input depends on nothing", f"{where}, node {index} ({node.name})")
        if node.num_bytes < 0:
            _fail("capture", f"sizes are not negative, got {node.num_bytes}", f"{where}, node {index} ({node.name})")
    before = _closure([(*node.inputs, *node.after) for node in capture.nodes])
    for first, second in itertools.pairwise(node for node in capture.nodes if node.is_collective):
        if not before[second.id] >> first.id & 1:
            found = f"collectives keep their order, this one need not come after {first.name}"
            _fail("capture", found, f"{where}, node {second.id} ({second.name})")
    names = [node.name for node in capture.nodes]
    if len(set(names)) != len(names):
        _fail("capture", f"names must be unique, repeated: {_repeated(names)}", where)
    for position, output in enumerate(capture.outputs):
        if output is not None and not 0 <= output < len(capture.nodes):
            _fail("capture", f"expected a node or None, got {output}", f"{where}, output {position}")


def check_partition(partition: Partition, capture: Capture) -> None:
    """Check that segments cover the compute nodes once, and that bodies, buffers and order agree with the graph."""
    graph = partition.graph
    _check_graph(graph)
    if len(partition.nodes_by_segment) != len(graph.segments):
        found = f"expected nodes of {len(graph.segments)} segments, got {len(partition.nodes_by_segment)}"
        _fail("partition", found, f"graph {graph.name}")
    segment_of = _check_cover(partition, capture)
    _check_bodies(partition, capture)
    _check_values(partition, capture)
    before = _closure([graph.predecessors(segment.id) for segment in graph.segments])
    _check_collectives(partition, capture, before)
    for segment in graph.segments:
        for node_id in partition.nodes_by_segment[segment.id]:
            for earlier in capture.nodes[node_id].after:
                other = segment_of.get(earlier)
                if other is not None and other != segment.id and not before[segment.id] >> other & 1:
                    found = (
                        f"{capture.nodes[node_id].name} must run after {capture.nodes[earlier].name} of segment {other}"
                    )
                    _fail("partition", f"{found}, but the segments are not ordered", _segment(graph, segment.id))


def _check_collectives(partition: Partition, capture: Capture, before: Sequence[int]) -> None:
    """Check that the segments say which of them have collectives, and are ordered as these are in the graph."""
    graph = partition.graph
    latest: tuple[SegmentId, str] | None = None
    segment_of = {node: SegmentId(s) for s, nodes in enumerate(partition.nodes_by_segment) for node in nodes}
    found = [(segment_of[node.id], node.name) for node in capture.nodes if node.is_collective]
    marked = [segment.id for segment in graph.segments if segment.has_collective]
    if marked != sorted({segment for segment, _ in found}):
        _fail("partition", f"segments {marked} say that they have collectives, {found} do", f"graph {graph.name}")
    for segment, name in found:
        if latest is not None and segment != latest[0] and not before[segment] >> latest[0] & 1:
            problem = f"collective {name} must be issued after {latest[1]} of segment {latest[0]}"
            _fail("partition", f"{problem}, but the segments are not ordered", _segment(graph, segment))
        latest = segment, name


def _check_graph(graph: SegmentGraph) -> None:
    where = f"graph {graph.name}"
    names = [segment.name for segment in graph.segments]
    if len(set(names)) != len(names):
        _fail("partition", f"segment names must be unique, repeated: {_repeated(names)}", where)
    readers: dict[BufferId, list[SegmentId]] = {}
    producer: dict[BufferId, SegmentId] = {}
    num_buffers = len(graph.buffers)
    for index, segment in enumerate(graph.segments):
        at = _segment(graph, SegmentId(index))
        if segment.id != index:
            _fail("partition", f"expected id {index}, got {segment.id}", at)
        if wrong := [b for b in (*segment.inputs, *segment.outputs) if not 0 <= b < num_buffers]:
            _fail("partition", f"buffers {wrong} do not exist, there are {num_buffers}", at)
        if len(set(segment.inputs)) != len(segment.inputs):
            _fail("partition", f"inputs must not repeat, got {segment.inputs}", at)
        if list(segment.after) != sorted(set(segment.after)) or any(not 0 <= other < index for other in segment.after):
            _fail("partition", f"`after` must ascend and name earlier segments, got {segment.after}", at)
        for buffer in segment.inputs:
            readers.setdefault(buffer, []).append(segment.id)
        for buffer in segment.outputs:
            if buffer in producer:
                _fail("partition", f"buffer {buffer} is made by segments {producer[buffer]} and {index}", at)
            producer[buffer] = segment.id
    for index, item in enumerate(graph.buffers):
        at = f"{where}, buffer {index} ({item.name})"
        if item.id != index:
            _fail("partition", f"expected id {index}, got {item.id}", at)
        if item.producer != producer.get(item.id):
            _fail("partition", f"buffer names producer {item.producer}, segments say {producer.get(item.id)}", at)
        if list(item.readers) != readers.get(item.id, []):
            _fail("partition", f"buffer names readers {item.readers}, segments say {readers.get(item.id, [])}", at)
        if (item.producer is None) != (item.id in graph.inputs):
            _fail("partition", "exactly the graph inputs have no producer", at)
        if item.producer is not None and any(reader <= item.producer for reader in item.readers):
            _fail(
                "partition",
                f"segments must be in topological order: made by {item.producer}, read by {item.readers}",
                at,
            )
        if item.is_output != (item.id in graph.outputs):
            _fail("partition", f"is_output is {item.is_output}, the graph returns {graph.outputs}", at)
    if len(set(graph.inputs)) != len(graph.inputs):
        _fail("partition", f"graph inputs must not repeat, got {graph.inputs}", where)
    if wrong_outputs := [b for b in graph.outputs if b is not None and not 0 <= b < num_buffers]:
        _fail("partition", f"graph outputs {wrong_outputs} do not exist, there are {num_buffers} buffers", where)


def _check_cover(partition: Partition, capture: Capture) -> dict[NodeId, SegmentId]:
    """Return the segment of every node that belongs to exactly one."""
    segment_of: dict[NodeId, SegmentId] = {}
    for index, nodes in enumerate(partition.nodes_by_segment):
        at = _segment(partition.graph, SegmentId(index))
        if list(nodes) != sorted(set(nodes)) or any(not 0 <= node < len(capture.nodes) for node in nodes):
            _fail("partition", f"nodes must ascend, without repeats, and exist; got {nodes}", at)
        for node in nodes:
            kind = capture.nodes[node].kind
            if kind is NodeKind.INPUT:
                _fail("partition", f"graph input {capture.nodes[node].name} belongs to no segment", at)
            if kind in _PLACED:
                if node in segment_of:
                    _fail("partition", f"node {capture.nodes[node].name} is also in segment {segment_of[node]}", at)
                segment_of[node] = SegmentId(index)
    for item in capture.nodes:
        if item.kind in _PLACED and item.id not in segment_of:
            _fail("partition", f"node {item.id} ({item.name}) is in no segment", f"graph {capture.name}")
        if item.kind is NodeKind.PROJECTION and any(segment_of.get(v) != segment_of[item.id] for v in item.inputs):
            found = f"node {item.id} ({item.name}) must be in the segment of what it projects"
            _fail("partition", found, _segment(partition.graph, segment_of[item.id]))
    alone = {segment_of[item.id] for item in capture.nodes if item.is_alone}
    for node, segment in segment_of.items():
        if segment in alone and not capture.nodes[node].is_alone:
            found = f"node {node} ({capture.nodes[node].name}) is with nodes that must be alone"
            _fail("partition", found, _segment(partition.graph, segment))
    return segment_of


def _check_bodies(partition: Partition, capture: Capture) -> None:
    """Check every body by itself, and that every segment has the operators of its body, in order."""
    graph = partition.graph
    for segment in graph.segments:
        if not 0 <= segment.body < len(partition.bodies):
            _fail(
                "partition",
                f"body {segment.body} does not exist, there are {len(partition.bodies)}",
                _segment(graph, segment.id),
            )
    for index, body in enumerate(partition.bodies):
        at = f"body {index} ({body.name})"
        if body.id != index:
            _fail("partition", f"expected id {index}, got {body.id}", at)
        external = _external_values(capture, body.nodes)
        if len(set(body.inputs)) != len(body.inputs) or set(body.inputs) != external:
            _fail(
                "partition", f"the body reads values {sorted(external)} from outside, its inputs are {body.inputs}", at
            )
        if not set(body.outputs) <= set(body.nodes):
            _fail("partition", f"outputs {body.outputs} must be among its nodes", at)
        if body.name not in {segment.name for segment in graph.segments if segment.body == index}:
            _fail("partition", "a body has the name of the first segment that has it", at)
    for segment in graph.segments:
        at = _segment(graph, segment.id)
        body = partition.bodies[segment.body]
        if (len(segment.inputs), len(segment.outputs)) != (len(body.inputs), len(body.outputs)):
            counts = f"{len(segment.inputs)} inputs and {len(segment.outputs)} outputs"
            _fail(
                "partition",
                f"body {body.id} has {len(body.inputs)} inputs and {len(body.outputs)} outputs, not {counts}",
                at,
            )
        if _operators(capture, partition.nodes_by_segment[segment.id]) != _operators(capture, body.nodes):
            _fail("partition", f"its operators differ from those of body {body.id} ({body.name}), which it shares", at)
        if body.name == segment.name and body.nodes != partition.nodes_by_segment[segment.id]:
            _fail("partition", f"body {body.id} was made from this segment and must have its nodes", at)


def _check_values(partition: Partition, capture: Capture) -> None:
    """Check that buffers carry the right values between segments, into the graph and out of it."""
    graph = partition.graph
    inputs = [node.id for node in capture.nodes if node.kind is NodeKind.INPUT]
    if len(inputs) != len(graph.inputs):
        _fail(
            "partition", f"the graph takes {len(inputs)} values, got {len(graph.inputs)} buffers", f"graph {graph.name}"
        )
    value_of = dict(zip(graph.inputs, inputs, strict=True))
    for segment in graph.segments:
        body = partition.bodies[segment.body]
        own = dict(zip(body.nodes, partition.nodes_by_segment[segment.id], strict=True))
        value_of.update((buffer, own[node]) for buffer, node in zip(segment.outputs, body.outputs, strict=True))
    for segment in graph.segments:
        expected = _external_values(capture, partition.nodes_by_segment[segment.id])
        got = {value_of[buffer] for buffer in segment.inputs}
        if expected != got:
            found = f"its nodes read values {sorted(expected)} from outside, its buffers carry {sorted(got)}"
            _fail("partition", found, _segment(graph, segment.id))
    returned = tuple(None if buffer is None else value_of[buffer] for buffer in graph.outputs)
    if returned != capture.outputs:
        _fail("partition", f"expected outputs {capture.outputs}, the buffers carry {returned}", f"graph {graph.name}")


def _operators(capture: Capture, nodes: Iterable[NodeId]) -> list[tuple[str, str]]:
    return [(capture.nodes[node].signature, capture.nodes[node].value) for node in nodes]


def _external_values(capture: Capture, nodes: Iterable[NodeId]) -> set[NodeId]:
    content = set(nodes)
    taken = {value for node in content for value in (*capture.nodes[node].inputs, *capture.nodes[node].sizes)}
    return taken - content


# ------------------------------------------------------------------------------------------------ stages 2 and 3


def check_costs(costs: CostTable, graph: SegmentGraph) -> None:
    """Check that every segment has modes, ascending in units, with durations of at least 1 ns and shares of time."""
    if len(costs.modes) != len(graph.segments):
        _fail("cost table", f"expected {len(graph.segments)} rows, got {len(costs.modes)}", f"graph {graph.name}")
    if costs.handover_ns < 0:
        _fail("cost table", f"handover_ns must not be negative, got {costs.handover_ns}", f"graph {graph.name}")
    for index, modes in enumerate(costs.modes):
        units = [mode.units for mode in modes]
        at = _segment(graph, SegmentId(index))
        if not modes or units != sorted(set(units)) or units[0] < 1:
            _fail("cost table", f"expected at least one mode, units ascending from 1, got units {units}", at)
        if wrong := [mode for mode in modes if not (0 <= mode.memory_share <= 1 and 0 <= mode.launch_share <= 1)]:
            _fail("cost table", f"expected shares of memory and launches between 0 and 1, got {wrong}", at)
        if wrong := [mode for mode in modes if mode.duration_ns < 1 or mode.memory_bytes < 0]:
            _fail("cost table", f"expected durations of at least 1 ns and sizes of at least 0, got {wrong}", at)


def check_plan(plan: Plan, graph: SegmentGraph, costs: CostTable) -> None:
    """Check that dependencies, hand-overs and units hold at every instant, and the claims about the makespan."""
    where = f"graph {graph.name}"
    if [a.segment for a in plan.assignments] != list(range(len(graph.segments))):
        _fail("plan", f"expected one assignment per segment, got {[a.segment for a in plan.assignments]}", where)
    if not plan.lanes or [lane.id for lane in plan.lanes] != list(range(len(plan.lanes))):
        _fail("plan", f"expected lanes 0, 1, ..., got {[lane.id for lane in plan.lanes]}", where)
    everything = set(plan.lanes[0].units)
    for lane in plan.lanes:
        if not lane.units or list(lane.units) != sorted(set(lane.units)) or not set(lane.units) <= everything:
            _fail(
                "plan", f"units must ascend and be among those of lane 0, got {lane.units}", f"{where}, lane {lane.id}"
            )
    for assignment in plan.assignments:
        at = _segment(graph, assignment.segment)
        if not 0 <= assignment.lane < len(plan.lanes):
            _fail("plan", f"lane {assignment.lane} does not exist, there are {len(plan.lanes)}", at)
        if assignment.start_ns < 0:
            _fail("plan", f"starts at {assignment.start_ns} ns", at)
        if assignment.quota.units != len(plan.lanes[assignment.lane].units):
            units = len(plan.lanes[assignment.lane].units)
            _fail("plan", f"lane {assignment.lane} has {units} units, the quota {assignment.quota.units}", at)
        quota = assignment.quota
        durations = [
            mode.duration_ns
            for mode in costs.modes[assignment.segment]
            if (mode.units, mode.memory_bytes) == (quota.units, quota.memory_bytes)
        ]
        if not durations:
            _fail("plan", f"(units, memory) {(quota.units, quota.memory_bytes)} is none of its modes", at)
        if assignment.duration_ns < durations[0]:
            _fail("plan", f"takes {assignment.duration_ns} ns, {durations[0]} ns even without neighbours", at)
    _check_order_of_collectives(plan, graph)
    _check_times(plan, graph, costs)
    last = max((a.end_ns for a in plan.assignments), default=0)
    if plan.makespan_ns != last:
        _fail("plan", f"the last segment ends at {last} ns, the makespan is {plan.makespan_ns} ns", where)
    serial = sum(m.duration_ns for modes in costs.modes for m in modes if m.units == len(everything))
    if plan.serial_ns != serial:
        _fail("plan", f"all on lane 0 takes {serial} ns, serial_ns is {plan.serial_ns}", where)
    if not 0 <= plan.lower_bound_ns <= plan.undisturbed_ns <= plan.makespan_ns:
        claims = f"{plan.lower_bound_ns}, {plan.undisturbed_ns}, {plan.makespan_ns} ns"
        _fail("plan", f"expected bound <= undisturbed makespan <= makespan, got {claims}", where)
    if plan.memory_quota is not None and (peak := _peak_bytes(plan, graph)) > plan.memory_quota:
        _fail("plan", f"holds {peak} bytes at once, the memory quota is {plan.memory_quota}", where)
    if plan.makespan_ns > plan.serial_ns and not plan.pinned:
        _fail("plan", f"serial takes {plan.serial_ns} ns, this plan {plan.makespan_ns} ns", where)


def _check_order_of_collectives(plan: Plan, graph: SegmentGraph) -> None:
    """Check that segments with collectives run one after the other, in graph order, as on all other ranks."""
    communicating = [segment.id for segment in graph.segments if segment.has_collective]
    for first, second in itertools.pairwise(communicating):
        end, start = plan.assignments[first].end_ns, plan.assignments[second].start_ns
        if start < end:
            found = (
                f"issues its collectives from {start} ns on, before those of segment {first} "
                f"({graph.segments[first].name}) are done at {end} ns, which come first in the graph: other ranks keep "
                "that order, and would exchange the wrong tensors or wait for ever"
            )
            _fail("plan", found, _segment(graph, second))


def _peak_bytes(plan: Plan, graph: SegmentGraph) -> int:
    """Return the most bytes that buffers made by the graph and workspaces take at once, if all goes as planned."""
    changes = []
    for segment, assignment in zip(graph.segments, plan.assignments, strict=True):
        changes += [(assignment.start_ns, segment.workspace_bytes), (assignment.end_ns, -segment.workspace_bytes)]
    for buffer in graph.buffers:
        if buffer.producer is not None:
            last = max(plan.assignments[user].end_ns for user in (buffer.producer, *buffer.readers))
            end = plan.makespan_ns if buffer.is_output else last
            changes += [(plan.assignments[buffer.producer].start_ns, buffer.num_bytes), (end, -buffer.num_bytes)]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _check_times(plan: Plan, graph: SegmentGraph, costs: CostTable) -> None:
    def check_order(before: SegmentId, after: SegmentId, why: str) -> None:
        first, second = plan.assignments[before], plan.assignments[after]
        ready = first.end_ns + (costs.handover_ns if first.lane != second.lane else 0)
        if second.start_ns < ready:
            found = f"starts at {second.start_ns} ns, but {why} segment {before} on lane {first.lane} until {ready} ns"
            _fail("plan", found, _segment(graph, after))

    for segment in graph.segments:
        for producer in graph.predecessors(segment.id):
            check_order(producer, segment.id, "depends on")
    last_user: dict[int, SegmentId] = {}
    for assignment in plan.in_start_order():
        for unit in plan.lanes[assignment.lane].units:
            if unit in last_user:
                check_order(last_user[unit], assignment.segment, f"shares unit {unit} with")
            last_user[unit] = assignment.segment


# ------------------------------------------------------------------------------------------------ stages 4, 5 and 6


def check_syncs(syncs: SyncPlan, graph: SegmentGraph, plan: Plan) -> None:
    """Check that lane order and waits enforce every dependency, and that no wait can be removed."""
    lane_of = [assignment.lane for assignment in plan.assignments]
    direct = _direct_order(plan, syncs)
    before = _closure(direct, [assignment.segment for assignment in plan.in_start_order()])
    needed = _needed_order(graph, plan)
    for producer, consumer in needed:
        if not before[consumer] >> producer & 1:
            _fail("sync plan", f"nothing makes it run after segment {producer}", _segment(graph, consumer))
    for wait in syncs.waits:
        at = _segment(graph, wait.consumer)
        if lane_of[wait.producer] == lane_of[wait.consumer]:
            _fail("sync plan", f"waits for segment {wait.producer} of its own lane {lane_of[wait.consumer]}", at)
        others = [other for other in direct[wait.consumer] if other != wait.producer]
        implied = any(other == wait.producer or before[other] >> wait.producer & 1 for other in others)
        if implied or direct[wait.consumer].count(wait.producer) > 1:
            _fail("sync plan", f"the wait for segment {wait.producer} is implied by lane order and other waits", at)
    across = {Dependency(producer=p, consumer=c) for p, c in needed if lane_of[p] != lane_of[c]}
    listed = [*syncs.waits, *syncs.dropped]
    if len(set(listed)) != len(listed) or set(listed) != across:
        wrong = sorted((d.producer, d.consumer) for d in set(listed) ^ across)
        found = f"waits and dropped must be the {len(across)} cross-lane dependencies, each once; got {len(listed)}"
        _fail("sync plan", f"{found}, different or repeated: {wrong or 'repeated'}", f"graph {graph.name}")


def check_memory(
    memory: MemoryPlan, graph: SegmentGraph, plan: Plan, syncs: SyncPlan, *, owners_release: bool = False
) -> None:
    """Check that every buffer that is not returned is let go once, by a segment ordered after all its users.

    With `owners_release`, that segment is on the lane of the buffer's producer, and no graph input is let go.
    """
    before = _closure(_direct_order(plan, syncs), [assignment.segment for assignment in plan.in_start_order()])
    let_go = [*(hold.buffer for hold in memory.holds), *memory.at_end]
    expected = [buffer.id for buffer in graph.buffers if not buffer.is_output]
    if sorted(let_go) != expected:
        wrong = sorted(set(let_go) ^ set(expected)) or _repeated(let_go)
        found = f"each of the {len(expected)} buffers that are not returned is let go once; wrong: {wrong}"
        _fail("memory plan", found, f"graph {graph.name}")
    for hold in memory.holds:
        buffer = graph.buffers[hold.buffer]
        owner = None if buffer.producer is None else plan.assignments[buffer.producer].lane
        if owners_release and plan.assignments[hold.segment].lane != owner:
            found = f"lets buffer {buffer.id} ({buffer.name}) go on another lane than its owner's, {owner}"
            _fail("memory plan", found, _segment(graph, hold.segment))
        for user in _users(graph, buffer.id):
            if user != hold.segment and not before[hold.segment] >> user & 1:
                found = (
                    f"lets buffer {buffer.id} ({buffer.name}) go without being ordered after its user, segment {user}"
                )
                _fail("memory plan", found, _segment(graph, hold.segment))
    peaks = memory.peak_bytes_by_lane
    if len(peaks) != len(plan.lanes) or not max(peaks, default=0) <= memory.peak_bytes <= sum(peaks):
        found = (
            f"expected a peak per lane, the largest <= the device's <= their sum; got {peaks} and {memory.peak_bytes}"
        )
        _fail("memory plan", found, f"graph {graph.name}")


def check_program(program: Program, graph: SegmentGraph, plan: Plan, syncs: SyncPlan, memory: MemoryPlan) -> None:
    """Check by symbolic execution: launches, events, buffers, and exactly the happens-before of the sync plan."""
    where = f"program {program.name}"
    if (program.lanes, program.num_buffers) != (plan.lanes, len(graph.buffers)):
        _fail("program", "lanes and buffers must be those of the plan and the graph", where)
    if (program.inputs, program.outputs) != (graph.inputs, graph.outputs):
        _fail("program", "inputs and outputs must be those of the graph", where)
    _check_launches(program, graph, plan)
    before = _execute(program, graph)
    promised = _closure(_direct_order(plan, syncs), [assignment.segment for assignment in plan.in_start_order()])
    for segment in graph.segments:
        if before[segment.id] != promised[segment.id]:
            wrong = [
                other.id for other in graph.segments if (before[segment.id] ^ promised[segment.id]) >> other.id & 1
            ]
            _fail(
                "program",
                f"its order against segments {wrong} is not that of the sync plan",
                _segment(graph, segment.id),
            )
    communicating = [segment.id for segment in graph.segments if segment.has_collective]
    for first, second in itertools.pairwise(communicating):
        if not before[second] >> first & 1:
            found = f"may issue its collectives before those of segment {first}, which come first in the graph"
            _fail("program", found, _segment(graph, second))
    _check_buffers(program, graph, before, memory)


def _check_launches(program: Program, graph: SegmentGraph, plan: Plan) -> None:
    launched: dict[SegmentId, int] = {}
    recorded: list[EventId] = []
    for lane, instructions in enumerate(program.instructions):
        for instruction in instructions:
            if isinstance(instruction, Launch):
                at = _segment(graph, instruction.segment)
                segment = graph.segments[instruction.segment]
                if segment.id in launched:
                    _fail("program", f"launched on lanes {launched[segment.id]} and {lane}", at)
                if lane != plan.assignments[segment.id].lane:
                    _fail(
                        "program", f"planned on lane {plan.assignments[segment.id].lane}, launched on lane {lane}", at
                    )
                body = (instruction.body, instruction.inputs, instruction.outputs)
                if body != (segment.body, segment.inputs, segment.outputs):
                    _fail("program", f"expected its body, inputs and outputs, got {body}", at)
                if len(instruction.takes) != len(instruction.inputs):
                    _fail("program", f"{len(instruction.inputs)} inputs, {len(instruction.takes)} takes", at)
                launched[segment.id] = lane
            elif isinstance(instruction, Record):
                recorded.append(instruction.event)
    if missing := [segment.id for segment in graph.segments if segment.id not in launched]:
        _fail("program", f"segments {missing} are not launched", f"program {program.name}")
    if sorted(recorded) != list(range(program.num_events)):
        found = f"expected events 0 to {program.num_events - 1} recorded once each, got {sorted(recorded)}"
        _fail("program", found, f"program {program.name}")


def _execute(program: Program, graph: SegmentGraph) -> list[int]:
    """Run all lanes as far as waits allow; return, per segment, the set of segments certainly ended when it starts."""
    position = [0] * len(program.instructions)
    known = [0] * len(program.instructions)
    at_event: dict[EventId, int] = {}
    before = [0] * len(graph.segments)
    moved = True
    while moved:
        moved = False
        for lane, instructions in enumerate(program.instructions):
            while position[lane] < len(instructions):
                instruction = instructions[position[lane]]
                if isinstance(instruction, Wait):
                    if instruction.event not in at_event:
                        break
                    known[lane] |= at_event[instruction.event]
                elif isinstance(instruction, Record):
                    at_event[instruction.event] = known[lane]
                elif isinstance(instruction, Launch):
                    before[instruction.segment] = known[lane]
                    known[lane] |= 1 << instruction.segment
                position[lane] += 1
                moved = True
    for lane, instructions in enumerate(program.instructions):
        if position[lane] < len(instructions):
            found = f"lane {lane} waits for ever at instruction {position[lane]}, {instructions[position[lane]]}"
            _fail("program", found, f"program {program.name}")
    return before


def _check_buffers(program: Program, graph: SegmentGraph, before: Sequence[int], memory: MemoryPlan) -> None:
    """Check that inputs are there when a segment starts, and that buffers go where and when the memory plan says."""
    holds = {hold.buffer: hold.segment for hold in memory.holds}
    gone: dict[BufferId, SegmentId] = {}
    for lane, instructions in enumerate(program.instructions):
        latest: SegmentId | None = None
        for instruction in instructions:
            lets_go: list[BufferId] = []
            if isinstance(instruction, Launch):
                latest = instruction.segment
                for buffer in instruction.inputs:
                    producer = graph.buffers[buffer].producer
                    if producer is not None and not before[latest] >> producer & 1:
                        _fail(
                            "program",
                            f"reads buffer {buffer} before segment {producer} has made it",
                            _segment(graph, latest),
                        )
                lets_go = [buffer for buffer, takes in zip(instruction.inputs, instruction.takes, strict=True) if takes]
            elif isinstance(instruction, Release):
                lets_go = [instruction.buffer]
            for buffer in lets_go:
                if latest is None:
                    _fail("program", f"buffer {buffer} is released before anything ran", f"lane {lane}")
                at = _segment(graph, latest)
                if buffer in gone or graph.buffers[buffer].is_output:
                    _fail(
                        "program",
                        f"buffer {buffer} is returned, or was let go by segment {gone.get(buffer)} before",
                        at,
                    )
                if holds.get(buffer) != latest:
                    _fail("program", f"lets buffer {buffer} go, which segment {holds.get(buffer)} holds", at)
                for user in _users(graph, buffer):
                    if user != latest and not before[latest] >> user & 1:
                        _fail("program", f"lets buffer {buffer} go while segment {user} may use it", at)
                gone[buffer] = latest
    if missing := sorted(set(holds) - set(gone)):
        _fail("program", f"buffers {missing} are held and never let go", f"program {program.name}")


# --------------------------------------------------------------------------------------------------------- order


def _needed_order(graph: SegmentGraph, plan: Plan) -> list[tuple[SegmentId, SegmentId]]:
    """Return every pair (earlier, later) that data, order or the use of a unit, one after the other, demands."""
    needed = {(producer, segment.id): None for segment in graph.segments for producer in graph.predecessors(segment.id)}
    order = plan.in_start_order()
    for unit in plan.lanes[0].units:
        users = [assignment.segment for assignment in order if unit in plan.lanes[assignment.lane].units]
        needed.update(dict.fromkeys(itertools.pairwise(users)))
    if plan.memory_quota is not None:
        needed.update(((a.segment, b.segment), None) for a in order for b in order if a.end_ns <= b.start_ns)
    return list(needed)


def _direct_order(plan: Plan, syncs: SyncPlan) -> list[list[SegmentId]]:
    """Return, per segment, the segment before it on its lane and those that it waits for."""
    direct: list[list[SegmentId]] = [[] for _ in plan.assignments]
    latest: dict[int, SegmentId] = {}
    for assignment in plan.in_start_order():
        if assignment.lane in latest:
            direct[assignment.segment].append(latest[assignment.lane])
        latest[assignment.lane] = assignment.segment
    for wait in syncs.waits:
        direct[wait.consumer].append(wait.producer)
    return direct


def _closure(direct: Sequence[Sequence[int]], order: Iterable[int] | None = None) -> list[int]:
    """Return, per segment or node, the set of all before it, as bits; in `order`, `direct` looks back only."""
    before = [0] * len(direct)
    for segment in range(len(direct)) if order is None else order:
        for other in direct[segment]:
            before[segment] |= before[other] | 1 << other
    return before


def _users(graph: SegmentGraph, buffer: BufferId) -> tuple[SegmentId, ...]:
    item = graph.buffers[buffer]
    return item.readers if item.producer is None else (item.producer, *item.readers)


def _segment(graph: SegmentGraph, segment: SegmentId) -> str:
    return f"graph {graph.name}, segment {segment} ({graph.segments[segment].name})"


def _repeated(items: Sequence[object]) -> list[object]:
    return [item for item in dict.fromkeys(items) if list(items).count(item) > 1]
