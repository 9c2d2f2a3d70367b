"""Every check accepts what its stage makes (the tests of the stages show that) and refuses what is broken here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.ir import (
    Body,
    BodyId,
    Buffer,
    BufferId,
    Capture,
    Node,
    NodeId,
    NodeKind,
    Partition,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Work,
    check,
)
from tests.builders import graph

LETTERS = "xabcdefgh"


def node(
    index: int, kind: NodeKind, *inputs: int, signature: str = "", after: tuple[int, ...] = (), is_alone: bool = False
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


def changed(items: tuple[Any, ...], index: int, **changes: object) -> tuple[Any, ...]:
    """Return the items with one of them changed."""
    return (*items[:index], replace(items[index], **changes), *items[index + 1 :])


def with_node(index: int, **changes: object) -> Capture:
    """Return the capture with one node changed."""
    return replace(capture(), nodes=changed(capture().nodes, index, **changes))


def with_segment(index: int, **changes: object) -> Partition:
    """Return the partition with one segment changed."""
    made = partition()
    return replace(made, graph=replace(made.graph, segments=changed(made.graph.segments, index, **changes)))


def with_buffer(index: int, **changes: object) -> Partition:
    """Return the partition with one buffer changed."""
    made = partition()
    return replace(made, graph=replace(made.graph, buffers=changed(made.graph.buffers, index, **changes)))


def with_body(index: int, **changes: object) -> Partition:
    """Return the partition with one body changed."""
    return replace(partition(), bodies=changed(partition().bodies, index, **changes))


def with_nodes_by_segment(*segments: tuple[int, ...]) -> Partition:
    """Return the partition with other nodes in its segments."""
    return replace(partition(), nodes_by_segment=tuple(tuple(map(NodeId, nodes)) for nodes in segments))


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
        (with_node(4, inputs=(NodeId(3), NodeId(3))), "inputs must not repeat"),
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
        (with_nodes_by_segment((1,), (2, 3)), "expected nodes of 3 segments, got 2"),
        (with_nodes_by_segment((1,), (2,), (2, 4)), "in no segment"),
        (with_nodes_by_segment((1,), (3, 2), (2, 4)), "comes before a node that it reads"),
        (with_nodes_by_segment((1,), (2, 3), (1, 4)), "also in segment 0"),
        (with_nodes_by_segment((0, 1), (2, 3), (4,)), "belongs to no segment"),
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


def test_segments_keep_the_order_of_collectives() -> None:
    """And say that they have some."""
    nodes = list(capture().nodes)
    for index in (1, 3):
        nodes[index] = replace(nodes[index], is_collective=True)
    communicating = replace(capture(), nodes=tuple(nodes))
    check.check_capture(communicating)
    with pytest.raises(InvariantError, match="are marked as collective"):
        check.check_partition(partition(), communicating)
    made = partition()
    marked = tuple(replace(segment, has_collective=segment.id < 2) for segment in made.graph.segments)
    check.check_partition(replace(made, graph=replace(made.graph, segments=marked)), communicating)
    apart = list(capture().nodes)
    apart[3] = replace(apart[3], inputs=(NodeId(0),), is_collective=True)
    apart[1] = replace(apart[1], is_collective=True)
    with pytest.raises(InvariantError, match="nothing orders this one after a"):
        check.check_capture(replace(capture(), nodes=tuple(apart)))
