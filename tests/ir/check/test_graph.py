"""Every check accepts what its stage makes (the tests of the stages show that) and refuses what is broken here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from apollo_compile import ir
from apollo_compile.errors import InvariantError
from apollo_compile.ir import check
from tests.builders import graph

LETTERS = "xabcdefgh"


def node(
    index: int, kind: ir.NodeKind, *inputs: int, signature: str = "", after: Sequence[int] = (), is_alone: bool = False
) -> ir.Node:
    """Return a node named by a letter."""
    return ir.Node(
        id=ir.NodeId(index),
        name=LETTERS[index],
        kind=kind,
        target=f"aten.{signature}",
        inputs=tuple(ir.NodeId(i) for i in inputs),
        after=tuple(ir.NodeId(i) for i in after),
        is_alone=is_alone,
        num_bytes=4,
        signature=signature,
    )


def capture() -> ir.Capture:
    """Return x -> a=mm(x), b=view(a), c=mm(b), d=add(b, c); the view is cheap and has two readers."""
    return ir.Capture(
        name="small",
        role=ir.Role.INFERENCE,
        nodes=(
            node(0, ir.NodeKind.INPUT),
            node(1, ir.NodeKind.COMPUTE, 0, signature="mm"),
            node(2, ir.NodeKind.CHEAP, 1, signature="view"),
            node(3, ir.NodeKind.COMPUTE, 2, signature="mm"),
            node(4, ir.NodeKind.COMPUTE, 2, 3, signature="add", after=(1,)),
        ),
        outputs=(ir.NodeId(4), None),
    )


def partition() -> ir.Partition:
    """Return segments {a}, {b, c}, {b, d} of `capture`."""
    made = graph((), (0,), (0, 1), names=("first", "second", "third"), sizes=[4] * 4)
    segments = tuple(replace(segment, work=ir.Work()) for segment in made.segments)
    buffers = tuple(replace(buffer, name=name) for buffer, name in zip(made.buffers, "xacd", strict=True))
    made = replace(made, name="small", segments=segments, buffers=buffers, outputs=(*made.outputs, None))
    bodies = (body(0, [1], [0], 1, "first"), body(1, [2, 3], [1], 3, "second"), body(2, [2, 4], [1, 3], 4, "third"))
    return ir.Partition(graph=made, bodies=bodies, nodes_by_segment=tuple(item.nodes for item in bodies))


def body(index: int, nodes: Sequence[int], inputs: Sequence[int], output: int, name: str = "") -> ir.Body:
    """Return a body with one output; the default name is that of the segments of `tests.builders.graph`."""
    own, taken, made = (tuple(map(ir.NodeId, each)) for each in (nodes, inputs, [output]))
    return ir.Body(id=ir.BodyId(index), name=name or f"m{index}", nodes=own, inputs=taken, outputs=made)


def changed(items: tuple[Any, ...], index: int, **changes: object) -> tuple[Any, ...]:
    """Return the items with one of them changed."""
    return (*items[:index], replace(items[index], **changes), *items[index + 1 :])


def with_node(index: int, **changes: object) -> ir.Capture:
    """Return the capture with one node changed."""
    return replace(capture(), nodes=changed(capture().nodes, index, **changes))


def with_part(kind: str, index: int, **changes: object) -> ir.Partition:
    """Return the partition with one of the segments or buffers of its graph changed."""
    made = partition()
    return replace(made, graph=replace(made.graph, **{kind: changed(getattr(made.graph, kind), index, **changes)}))


with_segment, with_buffer = partial(with_part, "segments"), partial(with_part, "buffers")


def with_body(index: int, **changes: object) -> ir.Partition:
    """Return the partition with one body changed."""
    return replace(partition(), bodies=changed(partition().bodies, index, **changes))


def with_nodes_by_segment(*segments: tuple[int, ...]) -> ir.Partition:
    """Return the partition with other nodes in its segments."""
    return replace(partition(), nodes_by_segment=tuple(tuple(map(ir.NodeId, nodes)) for nodes in segments))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_node(1, inputs=(ir.NodeId(3),)), "reads earlier nodes only"),
        (with_node(1, after=(ir.NodeId(1),)), "comes after earlier nodes only"),
        (with_node(4, inputs=(ir.NodeId(3), ir.NodeId(3))), "inputs must not repeat"),
        (with_node(0, kind=ir.NodeKind.INPUT, after=(ir.NodeId(0),)), "comes after earlier nodes only"),
        (with_node(2, name="a"), r"names must be unique, repeated: \['a'\]"),
        (replace(capture(), outputs=(ir.NodeId(9),)), "expected a node or None, got 9"),
        (with_nodes_by_segment((1,), (2, 3)), "expected nodes of 3 segments, got 2"),
        (with_nodes_by_segment((1,), (2,), (2, 4)), "in no segment"),
        (with_nodes_by_segment((1,), (3, 2), (2, 4)), "comes before a node that it reads"),
        (with_nodes_by_segment((1,), (2, 3), (1, 4)), "also in segment 0"),
        (with_nodes_by_segment((0, 1), (2, 3), (4,)), "belongs to no segment"),
        (with_segment(1, id=ir.SegmentId(2)), "expected id 1, got 2"),
        (with_segment(1, name="first"), r"repeated: \['first'\]"),
        (with_segment(1, inputs=(ir.BufferId(1), ir.BufferId(1))), "must not repeat"),
        (with_segment(1, inputs=(ir.BufferId(9),)), r"buffers \[9\] do not exist"),
        (with_segment(1, inputs=(ir.BufferId(0),)), "names readers"),
        (with_segment(1, after=(ir.SegmentId(1),)), "`after` must ascend and name earlier segments"),
        (with_segment(1, outputs=(ir.BufferId(1),)), "made by segments 0 and 1"),
        (with_segment(1, body=ir.BodyId(5)), "body 5 does not exist"),
        (with_segment(1, body=ir.BodyId(0)), "name of the first segment"),
        (with_buffer(2, producer=None), "names producer None, segments say 1"),
        (with_buffer(2, is_output=True), "is_output is True"),
        (with_buffer(3, is_output=False), "is_output is False"),
        (with_buffer(1, readers=(ir.SegmentId(1),)), "names readers"),
        (with_body(2, inputs=(ir.NodeId(1),)), "reads .* from outside"),
        (with_body(2, outputs=(ir.NodeId(3),)), "must be among its nodes"),
        (with_body(2, name="other"), "name of the first segment"),
        (with_body(1, outputs=(ir.NodeId(2),)), "its nodes read values"),
        (with_body(2, outputs=(ir.NodeId(2),)), "expected outputs"),
    ],
)
def test_a_broken_capture_or_partition_is_refused(broken: ir.Capture | ir.Partition, message: str) -> None:
    """The message says what and where; the sound ones have an order-only edge, a missing output and a cloned node."""
    check.check_capture(capture())
    check.check_partition(partition(), capture())
    with pytest.raises(InvariantError, match=message):
        check.check_capture(broken) if isinstance(broken, ir.Capture) else check.check_partition(broken, capture())


def test_order_without_data_must_reach_the_segments() -> None:
    """Node c comes after d's segment only if some dependency says so."""
    nodes = (
        node(0, ir.NodeKind.INPUT),
        node(1, ir.NodeKind.COMPUTE, 0, signature="a"),
        node(2, ir.NodeKind.COMPUTE, 0, signature="b", after=(1,)),
    )
    taken = ir.Capture(name="two", role=ir.Role.INFERENCE, nodes=nodes, outputs=(ir.NodeId(1), ir.NodeId(2)))
    bodies = (body(0, [1], [0], 1), body(1, [2], [0], 2))
    cut = ir.Partition(graph=graph((), ()), bodies=bodies, nodes_by_segment=((ir.NodeId(1),), (ir.NodeId(2),)))
    with pytest.raises(InvariantError, match="b must run after a of segment 0"):
        check.check_partition(cut, taken)
    check.check_partition(replace(cut, graph=graph((), (), after={1: [0]})), taken)


def test_a_node_that_is_to_be_alone_shares_no_segment() -> None:
    """But with its like."""

    def taken(*are_alone: bool) -> ir.Capture:
        nodes = (
            node(0, ir.NodeKind.INPUT),
            *(node(n, ir.NodeKind.COMPUTE, 0, is_alone=alone) for n, alone in enumerate(are_alone, 1)),
        )
        return ir.Capture(name="one", role=ir.Role.INFERENCE, nodes=nodes, outputs=(ir.NodeId(2),))

    both = body(0, [1, 2], [0], 2)
    cut = ir.Partition(graph=graph(()), bodies=(both,), nodes_by_segment=(both.nodes,))
    with pytest.raises(InvariantError, match=r"node 1 \(a\) is with nodes that must be alone"):
        check.check_partition(cut, taken(False, True))
    check.check_partition(cut, taken(True, True))


def test_an_error_has_what_where_and_what_to_do() -> None:
    """In one line."""
    with pytest.raises(InvariantError) as caught:
        check.check_capture(with_node(1, id=ir.NodeId(7)))
    assert str(caught.value) == (
        "capture is not legal: expected id 1, got 7; at graph small, node a; "
        "this is a defect of apollo_compile, please report it"
    )


def test_segments_keep_the_order_of_collectives() -> None:
    """And say that they have some."""
    nodes = changed(capture().nodes, 1, is_collective=True)
    communicating = replace(capture(), nodes=changed(nodes, 3, is_collective=True))
    check.check_capture(communicating)
    with pytest.raises(InvariantError, match="are marked as collective"):
        check.check_partition(partition(), communicating)
    made = partition()
    marked = tuple(replace(segment, has_collective=segment.id < 2) for segment in made.graph.segments)
    check.check_partition(replace(made, graph=replace(made.graph, segments=marked)), communicating)
    apart = replace(capture(), nodes=changed(nodes, 3, inputs=(ir.NodeId(0),), is_collective=True))
    with pytest.raises(InvariantError, match="nothing orders this one after a"):
        check.check_capture(apart)
