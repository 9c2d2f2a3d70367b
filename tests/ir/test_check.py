"""Every check accepts what its stage makes (the tests of the stages show that) and refuses what is broken here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.errors import InvariantError
from apollo_compile.ir import (
    Body,
    BodyId,
    Buffer,
    BufferId,
    Capture,
    Dependency,
    Node,
    NodeId,
    NodeKind,
    Partition,
    Plan,
    Quota,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Work,
    check,
)
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.sync import eliminate_syncs
from tests.builders import costs, graph, plan

LETTERS = "xabcdefgh"


def node(
    index: int,
    kind: NodeKind,
    *inputs: int,
    signature: str = "",
    after: tuple[int, ...] = (),
    is_alone: bool = False,
) -> Node:
    """Return a node named by a letter."""
    return Node(
        id=NodeId(index),
        name=LETTERS[index],
        kind=kind,
        target=f"aten.{signature}",
        inputs=tuple(NodeId(i) for i in inputs),
        after=tuple(NodeId(i) for i in after),
        is_alone=is_alone,
        num_bytes=4,
        signature=signature,
    )


def capture() -> Capture:
    """Return x -> a=mm(x), b=view(a), c=mm(b), d=add(b, c); the view is cheap and has two readers."""
    return Capture(
        name="small",
        role=Role.INFERENCE,
        nodes=(
            node(0, NodeKind.INPUT),
            node(1, NodeKind.COMPUTE, 0, signature="mm"),
            node(2, NodeKind.CHEAP, 1, signature="view"),
            node(3, NodeKind.COMPUTE, 2, signature="mm"),
            node(4, NodeKind.COMPUTE, 2, 3, signature="add", after=(1,)),
        ),
        outputs=(NodeId(4), None),
    )


def partition() -> Partition:
    """Return segments {a}, {b, c}, {b, d} of `capture`."""

    def segment(index: int, name: str, inputs: tuple[int, ...]) -> Segment:
        return Segment(
            id=SegmentId(index),
            name=name,
            module=name,
            body=BodyId(index),
            inputs=tuple(BufferId(i) for i in inputs),
            outputs=(BufferId(index + 1),),
            after=(),
            work=Work(),
        )

    def buffer(index: int, readers: tuple[int, ...], is_output: bool = False) -> Buffer:
        return Buffer(
            id=BufferId(index),
            name="xacd"[index],
            producer=SegmentId(index - 1) if index else None,
            readers=tuple(SegmentId(i) for i in readers),
            num_bytes=4,
            is_output=is_output,
        )

    def body(index: int, nodes: tuple[int, ...], inputs: tuple[int, ...], output: int) -> Body:
        return Body(
            id=BodyId(index),
            name=("first", "second", "third")[index],
            nodes=tuple(NodeId(i) for i in nodes),
            inputs=tuple(NodeId(i) for i in inputs),
            outputs=(NodeId(output),),
        )

    bodies = (body(0, (1,), (0,), 1), body(1, (2, 3), (1,), 3), body(2, (2, 4), (1, 3), 4))
    return Partition(
        graph=SegmentGraph(
            name="small",
            role=Role.INFERENCE,
            segments=(segment(0, "first", (0,)), segment(1, "second", (1,)), segment(2, "third", (1, 2))),
            buffers=(buffer(0, (0,)), buffer(1, (1, 2)), buffer(2, (2,)), buffer(3, (), is_output=True)),
            inputs=(BufferId(0),),
            outputs=(BufferId(3), None),
        ),
        bodies=bodies,
        nodes_by_segment=tuple(item.nodes for item in bodies),
    )


def with_node(index: int, **changes: object) -> Capture:
    """Return the capture with one node changed."""
    made = capture()
    nodes = list(made.nodes)
    nodes[index] = replace(nodes[index], **changes)  # type: ignore[arg-type]
    return replace(made, nodes=tuple(nodes))


def with_segment(index: int, **changes: object) -> Partition:
    """Return the partition with one segment changed."""
    made = partition()
    segments = list(made.graph.segments)
    segments[index] = replace(segments[index], **changes)  # type: ignore[arg-type]
    return replace(made, graph=replace(made.graph, segments=tuple(segments)))


def with_buffer(index: int, **changes: object) -> Partition:
    """Return the partition with one buffer changed."""
    made = partition()
    buffers = list(made.graph.buffers)
    buffers[index] = replace(buffers[index], **changes)  # type: ignore[arg-type]
    return replace(made, graph=replace(made.graph, buffers=tuple(buffers)))


def with_body(index: int, **changes: object) -> Partition:
    """Return the partition with one body changed."""
    made = partition()
    bodies = list(made.bodies)
    bodies[index] = replace(bodies[index], **changes)  # type: ignore[arg-type]
    return replace(made, bodies=tuple(bodies))


def test_a_sound_capture_and_partition_pass() -> None:
    """With a cheap node cloned into two segments, an order-only edge and a missing output."""
    check.check_capture(capture())
    check.check_partition(partition(), capture())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_node(1, id=NodeId(7)), "expected id 1, got 7"),
        (with_node(1, inputs=(NodeId(3),)), "reads earlier nodes only"),
        (with_node(1, after=(NodeId(1),)), "comes after earlier nodes only"),
        (with_node(4, inputs=(NodeId(3), NodeId(2))), "ascend without repeats"),
        (with_node(0, kind=NodeKind.INPUT, after=(NodeId(0),)), "comes after earlier nodes only"),
        (with_node(2, name="a"), r"names must be unique, repeated: \['a'\]"),
        (replace(capture(), outputs=(NodeId(9),)), "expected a node or None, got 9"),
    ],
)
def test_a_broken_capture_is_refused(broken: Capture, message: str) -> None:
    """The message says what and where."""
    with pytest.raises(InvariantError, match=message):
        check.check_capture(broken)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            replace(partition(), nodes_by_segment=partition().nodes_by_segment[:2]),
            "expected nodes of 3 segments, got 2",
        ),
        (replace(partition(), nodes_by_segment=((NodeId(1),), (NodeId(2),), (NodeId(2), NodeId(4)))), "in no segment"),
        (
            replace(partition(), nodes_by_segment=((NodeId(1),), (NodeId(2), NodeId(3)), (NodeId(1), NodeId(4)))),
            "also in segment 0",
        ),
        (
            replace(partition(), nodes_by_segment=((NodeId(0), NodeId(1)), (NodeId(2), NodeId(3)), (NodeId(4),))),
            "belongs to no segment",
        ),
        (with_segment(1, id=SegmentId(2)), "expected id 1, got 2"),
        (with_segment(1, name="first"), r"repeated: \['first'\]"),
        (with_segment(1, inputs=(BufferId(1), BufferId(1))), "must not repeat"),
        (with_segment(1, inputs=(BufferId(9),)), r"buffers \[9\] do not exist"),
        (with_segment(1, inputs=(BufferId(0),)), "names readers"),
        (with_segment(1, after=(SegmentId(1),)), "`after` must ascend and name earlier segments"),
        (with_segment(1, outputs=(BufferId(1),)), "made by segments 0 and 1"),
        (with_segment(1, body=BodyId(5)), "body 5 does not exist"),
        (with_segment(1, body=BodyId(0)), "name of the first segment"),
        (with_buffer(2, producer=None), "names producer None, segments say 1"),
        (with_buffer(2, is_output=True), "is_output is True"),
        (with_buffer(3, is_output=False), "is_output is False"),
        (with_buffer(1, readers=(SegmentId(1),)), "names readers"),
        (with_body(2, inputs=(NodeId(1),)), "reads values .* from outside"),
        (with_body(2, outputs=(NodeId(3),)), "must be among its nodes"),
        (with_body(2, name="other"), "name of the first segment"),
        (with_body(1, outputs=(NodeId(2),)), "its nodes read values"),
        (with_body(2, outputs=(NodeId(2),)), "expected outputs"),
    ],
)
def test_a_broken_partition_is_refused(broken: Partition, message: str) -> None:
    """The message says what and where."""
    with pytest.raises(InvariantError, match=message):
        check.check_partition(broken, capture())


def test_order_without_data_must_reach_the_segments() -> None:
    """Node c comes after d's segment only if some dependency says so."""
    made = graph((), ())
    nodes = (
        node(0, NodeKind.INPUT),
        node(1, NodeKind.COMPUTE, 0, signature="a"),
        node(2, NodeKind.COMPUTE, 0, signature="b", after=(1,)),
    )
    taken = Capture(name="two", role=Role.INFERENCE, nodes=nodes, outputs=(NodeId(1), NodeId(2)))
    bodies = tuple(
        Body(id=BodyId(s), name=f"m{s}", nodes=(NodeId(s + 1),), inputs=(NodeId(0),), outputs=(NodeId(s + 1),))
        for s in range(2)
    )
    cut = Partition(graph=made, bodies=bodies, nodes_by_segment=((NodeId(1),), (NodeId(2),)))
    with pytest.raises(InvariantError, match="b must run after a of segment 0"):
        check.check_partition(cut, taken)
    check.check_partition(replace(cut, graph=graph((), (), after={1: [0]})), taken)


def test_a_node_that_is_to_be_alone_shares_no_segment() -> None:
    """But with its like."""

    def taken(*are_alone: bool) -> Capture:
        nodes = (
            node(0, NodeKind.INPUT),
            *(node(n, NodeKind.COMPUTE, 0, is_alone=alone) for n, alone in enumerate(are_alone, 1)),
        )
        return Capture(name="one", role=Role.INFERENCE, nodes=nodes, outputs=(NodeId(2),))

    both = (NodeId(1), NodeId(2))
    body = Body(id=BodyId(0), name="m0", nodes=both, inputs=(NodeId(0),), outputs=(NodeId(2),))
    cut = Partition(graph=graph(()), bodies=(body,), nodes_by_segment=(both,))
    with pytest.raises(InvariantError, match=r"node 1 \(a\) is with nodes that must be alone"):
        check.check_partition(cut, taken(False, True))
    check.check_partition(cut, taken(True, True))


def test_an_error_has_what_where_and_what_to_do() -> None:
    """The four parts of house.md section 9."""
    with pytest.raises(InvariantError) as caught:
        check.check_capture(with_node(1, id=NodeId(7)))
    assert str(caught.value) == (
        "capture is not legal: expected id 1, got 7; at graph small, node a; "
        "this is a defect of apollo_compile, please report it"
    )


GRAPH = graph((), (), (0, 1))
PLAN = plan(GRAPH, "AB*")
COSTS = costs(GRAPH, PLAN.lanes, [10, 10])


def with_assignment(index: int, **changes: object) -> Plan:
    """Return the plan with one assignment changed."""
    assignments = list(PLAN.assignments)
    assignments[index] = replace(assignments[index], **changes)  # type: ignore[arg-type]
    return replace(PLAN, assignments=tuple(assignments))


SLOWER = replace(with_assignment(2, start_ns=21), makespan_ns=31)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(PLAN, assignments=PLAN.assignments[:2]), "one assignment per segment"),
        (with_assignment(0, lane=5), "lane 5 does not exist"),
        (with_assignment(0, start_ns=-1), "starts at -1"),
        (with_assignment(0, quota=Quota(units=2, memory_bytes=100)), "has 1 units, the quota 2"),
        (with_assignment(0, quota=Quota(units=1, memory_bytes=7)), "none of its modes"),
        (with_assignment(0, duration_ns=9), "takes 9 ns, 10 ns even without neighbours"),
        (with_assignment(1, lane=1), "shares unit 0 with segment 0"),
        (with_assignment(2, start_ns=9), "depends on segment 0"),
        (replace(PLAN, makespan_ns=21), "the makespan is 21 ns"),
        (replace(PLAN, serial_ns=31), "serial_ns is 31"),
        (replace(PLAN, lower_bound_ns=21), "bound <= undisturbed makespan <= makespan"),
        (replace(PLAN, undisturbed_ns=21), "bound <= undisturbed makespan <= makespan"),
        (replace(PLAN, memory_quota=199), "holds 300 bytes at once, the memory quota is 199"),
        (SLOWER, "serial takes 30 ns, this plan 31 ns"),
    ],
)
def test_a_broken_plan_is_refused(broken: Plan, message: str) -> None:
    """The message says what and where."""
    check.check_plan(PLAN, GRAPH, COSTS)
    with pytest.raises(InvariantError, match=message):
        check.check_plan(broken, GRAPH, COSTS)


def test_a_segment_may_take_longer_beside_others_and_a_pinned_plan_longer_than_serial() -> None:
    """Interference is part of a plan's durations; what a user pins is the user's."""
    check.check_plan(with_assignment(0, duration_ns=10, start_ns=0), GRAPH, COSTS)
    disturbed = replace(with_assignment(2, duration_ns=12), makespan_ns=22)
    check.check_plan(disturbed, GRAPH, COSTS)
    check.check_plan(replace(SLOWER, pinned=True), GRAPH, COSTS)


def test_a_plan_that_issues_collectives_in_another_order_is_refused() -> None:
    """Two branches communicate; whichever is ready first, all ranks keep the order of the graph."""
    made = graph((), (0,), (), (2,), (1, 3), collectives=(1, 3))
    table = costs(made, lane_catalogue(2), *[[10, 10]] * 5)
    swapped = plan(made, "AABB*", costs=table, order=(2, 3, 0, 1, 4))
    at_once = plan(made, "AABB*", costs=table)
    for wrong in (swapped, at_once):
        with pytest.raises(InvariantError, match=r"segment 3 .*") as caught:
            check.check_plan(wrong, made, table)
        assert "before those of segment 1 (m1) are done" in str(caught.value)
        assert "exchange the wrong tensors or wait for ever" in str(caught.value)
    ordered = graph((), (0,), (), (2,), (1, 3), after={3: (1,)}, collectives=(1, 3))
    for order in ((0, 2, 1, 3, 4), (2, 0, 1, 3, 4)):
        check.check_plan(plan(ordered, "AABB*", costs=table, order=order), ordered, table)


def test_a_program_that_may_issue_collectives_in_another_order_is_refused() -> None:
    """A plan's times are predictions; only waits and lanes keep an order."""
    made = graph((), (), (0, 1), collectives=(0, 1))
    table = costs(made, lane_catalogue(2), [10, 10], [10, 10], [10, 10])
    side_by_side = plan(made, "AB*", costs=table)
    syncs = eliminate_syncs(made, side_by_side)
    memory = plan_memory(made, side_by_side, syncs)
    program = emit_program(made, side_by_side, syncs, memory)
    with pytest.raises(InvariantError, match="may issue its collectives before those of segment 0"):
        check.check_program(program, made, side_by_side, syncs, memory)


def test_segments_keep_the_order_of_collectives() -> None:
    """And say that they have some."""
    nodes = list(capture().nodes)
    for index in (1, 3):
        nodes[index] = replace(nodes[index], is_collective=True)
    communicating = replace(capture(), nodes=tuple(nodes))
    check.check_capture(communicating)
    with pytest.raises(InvariantError, match="say that they have collectives"):
        check.check_partition(partition(), communicating)
    made = partition()
    marked = tuple(replace(segment, has_collective=segment.id < 2) for segment in made.graph.segments)
    check.check_partition(replace(made, graph=replace(made.graph, segments=marked)), communicating)
    apart = list(capture().nodes)
    apart[3] = replace(apart[3], inputs=(NodeId(0),), is_collective=True)
    apart[1] = replace(apart[1], is_collective=True)
    with pytest.raises(InvariantError, match="this one need not come after a"):
        check.check_capture(replace(capture(), nodes=tuple(apart)))


def test_a_plan_must_leave_time_for_hand_overs() -> None:
    """The same plan under costs with a hand-over."""
    with pytest.raises(InvariantError, match="until 13 ns"):
        check.check_plan(PLAN, GRAPH, replace(COSTS, handover_ns=3))


@pytest.mark.parametrize(
    ("row", "message"),
    [((), "at least one mode"), (tuple(reversed(COSTS.modes[0])), "ascending"), (COSTS.modes[0] * 2, "ascending")],
)
def test_broken_costs_are_refused(row: tuple[object, ...], message: str) -> None:
    """Rows without modes, in the wrong order, repeated."""
    check.check_costs(COSTS, GRAPH)
    with pytest.raises(InvariantError, match=message):
        check.check_costs(replace(COSTS, modes=(row, *COSTS.modes[1:])), GRAPH)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", ("memory_share", "launch_share"))
def test_a_share_of_memory_or_launches_is_between_zero_and_one(share: str) -> None:
    """It is a share of the duration."""
    wrong = replace(COSTS.modes[0][0], **{share: 1.5})  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="between 0 and 1"):
        check.check_costs(replace(COSTS, modes=((wrong, COSTS.modes[0][1]), *COSTS.modes[1:])), GRAPH)


def test_a_duration_of_zero_is_refused() -> None:
    """It would leave the start order open."""
    with pytest.raises(InvariantError, match="at least 1 ns"):
        check.check_costs(costs(GRAPH, PLAN.lanes, [0, 10]), GRAPH)


def test_missing_and_superfluous_waits_are_refused() -> None:
    """Both directions, and dependencies that are listed nowhere."""
    syncs = eliminate_syncs(GRAPH, PLAN)
    check.check_syncs(syncs, GRAPH, PLAN)
    first, second = syncs.waits
    with pytest.raises(InvariantError, match="nothing makes it run after segment"):
        check.check_syncs(replace(syncs, waits=(first,), dropped=(second,)), GRAPH, PLAN)
    with pytest.raises(InvariantError, match="implied"):
        check.check_syncs(replace(syncs, waits=(*syncs.waits, first)), GRAPH, PLAN)
    extra = Dependency(producer=SegmentId(0), consumer=SegmentId(1))
    with pytest.raises(InvariantError, match="cross-lane dependencies, each once"):
        check.check_syncs(replace(syncs, dropped=(extra,)), GRAPH, PLAN)
    chained = graph((), (), (0, 1), (0,))
    planned = plan(chained, "ABAA")
    implied = eliminate_syncs(chained, planned)
    own = Dependency(producer=SegmentId(0), consumer=SegmentId(2))
    with pytest.raises(InvariantError, match="of its own lane"):
        check.check_syncs(replace(implied, waits=(*implied.waits, own)), chained, planned)


def test_broken_memory_plans_are_refused() -> None:
    """Released too early, twice, or not at all; an output released; peaks that cannot be."""
    syncs = eliminate_syncs(GRAPH, PLAN)
    memory = plan_memory(GRAPH, PLAN, syncs)
    check.check_memory(memory, GRAPH, PLAN, syncs)
    early = tuple(replace(hold, segment=SegmentId(0)) for hold in memory.holds)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: replace(memory, holds=early), "without being ordered after its user"),
        (lambda: replace(memory, holds=memory.holds[1:]), r"wrong: \[\d\]"),
        (lambda: replace(memory, at_end=(memory.holds[0].buffer,)), r"wrong: \[\d\]"),
        (lambda: replace(memory, at_end=(BufferId(3),)), r"wrong: \[3\]"),
        (lambda: replace(memory, peak_bytes=10**9), "a peak per lane"),
    ]
    for broken, message in cases:
        with pytest.raises(InvariantError, match=message):
            check.check_memory(broken(), GRAPH, PLAN, syncs)  # type: ignore[arg-type]
