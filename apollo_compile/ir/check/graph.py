"""Checks of captures and partitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from apollo_compile.ir import BufferId, Capture, NodeId, NodeKind, Partition, SegmentGraph, SegmentId
from apollo_compile.ir.check.failure import at_segment, fail, repeated
from apollo_compile.ir.check.order import closure

_PLACED = (NodeKind.COMPUTE, NodeKind.PROJECTION, NodeKind.PART)
"""Kinds of nodes that belong to exactly one segment."""


def check_capture(capture: Capture) -> None:
    """Check ids, order and references: every node reads, and comes after, earlier nodes only."""
    where = f"graph {capture.name}"
    for index, node in enumerate(capture.nodes):
        if node.id != index:
            fail("capture", f"expected id {index}, got {node.id}", f"{where}, node {node.name}")
        for kind, others in (("reads", node.inputs), ("is sized by", node.sizes), ("comes after", node.after)):
            if wrong := [other for other in others if not 0 <= other < index]:
                fail(
                    "capture",
                    f"a node {kind} earlier nodes only, this one {kind} {wrong}",
                    f"{where}, node {index} ({node.name})",
                )
        if len(set(node.inputs)) != len(node.inputs):
            fail("capture", f"inputs must not repeat, got {node.inputs}", f"{where}, node {index} ({node.name})")
        if wrong_sizes := [other for other in node.sizes if capture.nodes[other].kind is not NodeKind.INPUT]:
            found = f"sizes are graph inputs, these are not: {wrong_sizes}"
            fail("capture", found, f"{where}, node {index} ({node.name})")
        if node.kind is NodeKind.INPUT and (node.inputs or node.after or node.sizes):
            fail("capture", "a graph input depends on nothing", f"{where}, node {index} ({node.name})")
        if node.num_bytes < 0:
            fail("capture", f"sizes are not negative, got {node.num_bytes}", f"{where}, node {index} ({node.name})")
    before = closure([(*node.inputs, *node.after) for node in capture.nodes])
    for first, second in itertools.pairwise(node for node in capture.nodes if node.is_collective):
        if not before[second.id] >> first.id & 1:
            found = f"collectives must keep their order, but nothing orders this one after {first.name}"
            fail("capture", found, f"{where}, node {second.id} ({second.name})")
    names = [node.name for node in capture.nodes]
    if len(set(names)) != len(names):
        fail("capture", f"names must be unique, repeated: {repeated(names)}", where)
    for position, output in enumerate(capture.outputs):
        if output is not None and not 0 <= output < len(capture.nodes):
            fail("capture", f"expected a node or None, got {output}", f"{where}, output {position}")


def check_partition(partition: Partition, capture: Capture) -> None:
    """Check that segments cover the compute nodes once, and that bodies, buffers and order agree with the graph."""
    graph = partition.graph
    _check_graph(graph)
    if len(partition.nodes_by_segment) != len(graph.segments):
        found = f"expected nodes of {len(graph.segments)} segments, got {len(partition.nodes_by_segment)}"
        fail("partition", found, f"graph {graph.name}")
    segment_of = _check_cover(partition, capture)
    _check_bodies(partition, capture)
    _check_values(partition, capture)
    before = closure([graph.predecessors(segment.id) for segment in graph.segments])
    _check_collectives(partition, capture, before)
    for segment in graph.segments:
        for node_id in partition.nodes_by_segment[segment.id]:
            for earlier in capture.nodes[node_id].after:
                other = segment_of.get(earlier)
                if other is not None and other != segment.id and not before[segment.id] >> other & 1:
                    found = (
                        f"{capture.nodes[node_id].name} must run after {capture.nodes[earlier].name} of segment {other}"
                    )
                    fail("partition", f"{found}, but the segments are not ordered", at_segment(graph, segment.id))


def _check_collectives(partition: Partition, capture: Capture, before: Sequence[int]) -> None:
    """Check `has_collective`, and that segments with collectives are ordered as the collectives are in the graph."""
    graph = partition.graph
    latest: tuple[SegmentId, str] | None = None
    segment_of = {node: SegmentId(s) for s, nodes in enumerate(partition.nodes_by_segment) for node in nodes}
    found = [(segment_of[node.id], node.name) for node in capture.nodes if node.is_collective]
    marked = [segment.id for segment in graph.segments if segment.has_collective]
    if marked != sorted({segment for segment, _ in found}):
        fail("partition", f"segments {marked} are marked as collective, collectives: {found}", f"graph {graph.name}")
    for segment, name in found:
        if latest is not None and segment != latest[0] and not before[segment] >> latest[0] & 1:
            problem = f"collective {name} must be issued after {latest[1]} of segment {latest[0]}"
            fail("partition", f"{problem}, but the segments are not ordered", at_segment(graph, segment))
        latest = segment, name


def _check_graph(graph: SegmentGraph) -> None:
    where = f"graph {graph.name}"
    names = [segment.name for segment in graph.segments]
    if len(set(names)) != len(names):
        fail("partition", f"segment names must be unique, repeated: {repeated(names)}", where)
    readers: dict[BufferId, list[SegmentId]] = {}
    producer: dict[BufferId, SegmentId] = {}
    num_buffers = len(graph.buffers)
    for index, segment in enumerate(graph.segments):
        at = at_segment(graph, SegmentId(index))
        if segment.id != index:
            fail("partition", f"expected id {index}, got {segment.id}", at)
        if wrong := [b for b in (*segment.inputs, *segment.outputs) if not 0 <= b < num_buffers]:
            fail("partition", f"buffers {wrong} do not exist, there are {num_buffers}", at)
        if len(set(segment.inputs)) != len(segment.inputs):
            fail("partition", f"inputs must not repeat, got {segment.inputs}", at)
        if list(segment.after) != sorted(set(segment.after)) or any(not 0 <= other < index for other in segment.after):
            fail("partition", f"`after` must ascend and name earlier segments, got {segment.after}", at)
        for buffer in segment.inputs:
            readers.setdefault(buffer, []).append(segment.id)
        for buffer in segment.outputs:
            if buffer in producer:
                fail("partition", f"buffer {buffer} is made by segments {producer[buffer]} and {index}", at)
            producer[buffer] = segment.id
    for index, item in enumerate(graph.buffers):
        at = f"{where}, buffer {index} ({item.name})"
        if item.id != index:
            fail("partition", f"expected id {index}, got {item.id}", at)
        if item.producer != producer.get(item.id):
            fail("partition", f"buffer names producer {item.producer}, segments say {producer.get(item.id)}", at)
        if list(item.readers) != readers.get(item.id, []):
            fail("partition", f"buffer names readers {item.readers}, segments say {readers.get(item.id, [])}", at)
        if (item.producer is None) != (item.id in graph.inputs):
            fail("partition", "exactly the graph inputs have no producer", at)
        if item.producer is not None and any(reader <= item.producer for reader in item.readers):
            fail(
                "partition",
                f"segments must be in topological order: made by {item.producer}, read by {item.readers}",
                at,
            )
        if item.is_output != (item.id in graph.outputs):
            fail("partition", f"is_output is {item.is_output}, the graph returns {graph.outputs}", at)
    if len(set(graph.inputs)) != len(graph.inputs):
        fail("partition", f"graph inputs must not repeat, got {graph.inputs}", where)
    if wrong_outputs := [b for b in graph.outputs if b is not None and not 0 <= b < num_buffers]:
        fail("partition", f"graph outputs {wrong_outputs} do not exist, there are {num_buffers} buffers", where)


def _check_cover(partition: Partition, capture: Capture) -> dict[NodeId, SegmentId]:
    """Return the segment of every node that belongs to exactly one."""
    segment_of: dict[NodeId, SegmentId] = {}
    for index, nodes in enumerate(partition.nodes_by_segment):
        at = at_segment(partition.graph, SegmentId(index))
        if len(set(nodes)) != len(nodes) or any(not 0 <= node < len(capture.nodes) for node in nodes):
            fail("partition", f"nodes must exist and not repeat, got {nodes}", at)
        position = {node: place for place, node in enumerate(nodes)}
        for node in nodes:
            item = capture.nodes[node]
            if any(position.get(other, -1) > position[node] for other in (*item.inputs, *item.after)):
                fail("partition", f"node {item.name} comes before a node that it reads or follows; got {nodes}", at)
            kind = capture.nodes[node].kind
            if kind is NodeKind.INPUT:
                fail("partition", f"graph input {capture.nodes[node].name} belongs to no segment", at)
            if kind in _PLACED:
                if node in segment_of:
                    fail("partition", f"node {capture.nodes[node].name} is also in segment {segment_of[node]}", at)
                segment_of[node] = SegmentId(index)
    for item in capture.nodes:
        if item.kind in _PLACED and item.id not in segment_of:
            fail("partition", f"node {item.id} ({item.name}) is in no segment", f"graph {capture.name}")
        if item.kind is NodeKind.PROJECTION and any(segment_of.get(v) != segment_of[item.id] for v in item.inputs):
            found = f"node {item.id} ({item.name}) must be in the segment of its input"
            fail("partition", found, at_segment(partition.graph, segment_of[item.id]))
    alone = {segment_of[item.id] for item in capture.nodes if item.is_alone}
    for node, segment in segment_of.items():
        if segment in alone and not capture.nodes[node].is_alone:
            found = f"node {node} ({capture.nodes[node].name}) is with nodes that must be alone"
            fail("partition", found, at_segment(partition.graph, segment))
    return segment_of


def _check_bodies(partition: Partition, capture: Capture) -> None:
    """Check every body by itself, and that every segment has the operators of its body, in order."""
    graph = partition.graph
    for segment in graph.segments:
        if not 0 <= segment.body < len(partition.bodies):
            fail(
                "partition",
                f"body {segment.body} does not exist, there are {len(partition.bodies)}",
                at_segment(graph, segment.id),
            )
    for index, body in enumerate(partition.bodies):
        at = f"body {index} ({body.name})"
        if body.id != index:
            fail("partition", f"expected id {index}, got {body.id}", at)
        external = _external_values(capture, body.nodes)
        if len(set(body.inputs)) != len(body.inputs) or set(body.inputs) != external:
            fail("partition", f"the body reads {sorted(external)} from outside, its inputs are {body.inputs}", at)
        if not set(body.outputs) <= set(body.nodes):
            fail("partition", f"outputs {body.outputs} must be among its nodes", at)
        if body.name not in {segment.name for segment in graph.segments if segment.body == index}:
            fail("partition", "a body has the name of the first segment that has it", at)
    for segment in graph.segments:
        at = at_segment(graph, segment.id)
        body = partition.bodies[segment.body]
        if (len(segment.inputs), len(segment.outputs)) != (len(body.inputs), len(body.outputs)):
            counts = f"{len(segment.inputs)} inputs and {len(segment.outputs)} outputs"
            fail(
                "partition",
                f"body {body.id} has {len(body.inputs)} inputs and {len(body.outputs)} outputs, not {counts}",
                at,
            )
        if _operators(capture, partition.nodes_by_segment[segment.id]) != _operators(capture, body.nodes):
            fail("partition", f"its operators differ from those of body {body.id} ({body.name}), which it shares", at)
        if body.name == segment.name and body.nodes != partition.nodes_by_segment[segment.id]:
            fail("partition", f"body {body.id} was made from this segment and must have its nodes", at)


def _check_values(partition: Partition, capture: Capture) -> None:
    """Check that buffers carry the right values between segments, into the graph and out of it."""
    graph = partition.graph
    inputs = [node.id for node in capture.nodes if node.kind is NodeKind.INPUT]
    if len(inputs) != len(graph.inputs):
        fail("partition", f"it takes {len(inputs)} values, got {len(graph.inputs)} buffers", f"graph {graph.name}")
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
            fail("partition", found, at_segment(graph, segment.id))
    returned = tuple(None if buffer is None else value_of[buffer] for buffer in graph.outputs)
    if returned != capture.outputs:
        fail("partition", f"expected outputs {capture.outputs}, the buffers carry {returned}", f"graph {graph.name}")


def _operators(capture: Capture, nodes: Iterable[NodeId]) -> list[tuple[str, str]]:
    return [(capture.nodes[node].signature, capture.nodes[node].value) for node in nodes]


def _external_values(capture: Capture, nodes: Iterable[NodeId]) -> set[NodeId]:
    content = set(nodes)
    taken = {value for node in content for value in (*capture.nodes[node].inputs, *capture.nodes[node].sizes)}
    return taken - content
