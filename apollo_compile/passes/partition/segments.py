"""Segments, buffers and bodies of a partition, built from its pieces."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from apollo_compile.cost_model.fusion import segment_needs
from apollo_compile.ir import (
    Body,
    BodyId,
    Buffer,
    BufferId,
    Capture,
    KernelKind,
    Node,
    NodeId,
    NodeKind,
    Partition,
    Phase,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
)
from apollo_compile.passes.partition.clusters import Clusters, weight_of
from apollo_compile.passes.partition.labels import CASTS, UPDATE, layer_of
from apollo_compile.passes.partition.pieces import FIRST, LAST, Pieces


def build(capture: Capture, clusters: Clusters, contracted: Pieces, is_apart: list[bool]) -> Partition:
    """Return the partition with one segment for every piece."""
    nodes = capture.nodes
    order = contracted.in_topological_order()
    pieces = [sorted(contracted.clusters[piece]) for piece in order]
    segment_by_cluster = {cluster: SegmentId(s) for s, piece in enumerate(pieces) for cluster in piece}
    segment_by_node = {node: segment_by_cluster[cluster] for node, cluster in clusters.cluster_by_node.items()}
    returned = {node for node in capture.outputs if node is not None}

    contents = [_with_clones(nodes, clusters, piece) for piece in pieces]
    needed = [_external_values(nodes, content) for content in contents]
    crossing = set().union(*needed) if needed else set()
    readers: dict[NodeId, list[SegmentId]] = defaultdict(list)
    for s, taken in enumerate(needed):
        for value in taken:
            readers[value].append(SegmentId(s))

    made = [
        tuple(n for n in content if segment_by_node.get(n) == s and (n in crossing or n in returned))
        for s, content in enumerate(contents)
    ]
    inputs = [node.id for node in nodes if node.kind is NodeKind.INPUT]
    values = inputs + [value for results in made for value in results]
    buffer_by_node = {value: BufferId(b) for b, value in enumerate(values)}
    buffers = tuple(
        Buffer(
            id=buffer_by_node[value],
            name=nodes[value].name,
            producer=segment_by_node.get(value),
            readers=tuple(readers[value]),
            num_bytes=nodes[value].num_bytes,
            is_output=value in returned,
        )
        for value in values
    )

    bodies: dict[str, Body] = {}
    segments = []
    names = _Names()
    for s, content in enumerate(contents):
        is_weights = all(is_apart[cluster] for cluster in pieces[s])
        module, name, phase = _name(capture, content, names, contracted.label[order[s]], is_weights=is_weights)
        needs = segment_needs([nodes[node] for node in sorted(content)], outputs=made[s])
        key = _body_key(nodes, content, needed[s], made[s])
        body = bodies.setdefault(
            key, Body(id=BodyId(len(bodies)), name=name, nodes=content, inputs=needed[s], outputs=made[s])
        )
        segments.append(
            Segment(
                id=SegmentId(s),
                name=name,
                module=module,
                body=body.id,
                inputs=tuple(buffer_by_node[value] for value in needed[s]),
                outputs=tuple(buffer_by_node[value] for value in made[s]),
                after=_order_only(nodes, content, segment_by_node, SegmentId(s)),
                work=needs.work,
                workspace_bytes=needs.workspace_bytes,
                has_collective=any(nodes[node].is_collective for node in content),
                phase=phase if capture.role is Role.STEP else None,
            )
        )
    return Partition(
        graph=SegmentGraph(
            name=capture.name,
            role=capture.role,
            segments=tuple(segments),
            buffers=buffers,
            inputs=tuple(buffer_by_node[value] for value in inputs),
            outputs=tuple(None if value is None else buffer_by_node[value] for value in capture.outputs),
        ),
        bodies=tuple(bodies.values()),
        nodes_by_segment=tuple(contents),
    )


def _with_clones(nodes: Sequence[Node], clusters: Clusters, piece: list[int]) -> tuple[NodeId, ...]:
    """Return the nodes of a piece in graph order, each cheap node before its first reader, or at the end.

    The position of a cheap node in the graph is ignored, so that equal pieces have an equal order.
    """

    def is_cheap(node: NodeId) -> bool:
        return nodes[node].kind is NodeKind.CHEAP

    content: dict[NodeId, None] = {}
    own = sorted(node for cluster in piece for node in clusters.members[cluster])
    for node in sorted(own, key=is_cheap):
        pending = [node]
        while pending:
            missing = [v for v in nodes[pending[-1]].inputs if is_cheap(v) and v not in content]
            if missing:
                pending.append(missing[0])
            else:
                content[pending.pop()] = None
    return tuple(content)


def _external_values(nodes: Sequence[Node], content: Sequence[NodeId]) -> tuple[NodeId, ...]:
    """Return the values that a segment takes from outside, in order of first use, and then the sizes."""
    inside = set(content)
    found = dict.fromkeys(value for node in content for value in nodes[node].inputs if value not in inside)
    sizes = {value for node in content for value in nodes[node].sizes}
    return (*found, *sorted(sizes))


def _order_only(
    nodes: Sequence[Node], content: tuple[NodeId, ...], segment_by_node: dict[NodeId, SegmentId], segment: SegmentId
) -> tuple[SegmentId, ...]:
    earlier = {segment_by_node[value] for node in content for value in nodes[node].after if value in segment_by_node}
    return tuple(sorted(earlier - {segment}))


def _body_key(
    nodes: Sequence[Node], content: tuple[NodeId, ...], inputs: tuple[NodeId, ...], outputs: tuple[NodeId, ...]
) -> str:
    """Return a text that is equal for segments with the same code: operators, wiring, and the inputs' layout."""
    local = {value: f"in{i} {nodes[value].value}" for i, value in enumerate(inputs)}
    lines = []
    for line, node in enumerate(content):
        arguments = ", ".join(local[value] for value in nodes[node].inputs)
        lines.append(f"{nodes[node].signature} <- {arguments} -> {nodes[node].value}")
        local[node] = f"line{line}"
    return "\n".join([*lines, "return " + ", ".join(local[value] for value in outputs)])


class _Names:
    """Makes names unique: the second `a` becomes `a#2`."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        """Return `name`, with a number appended if it was given before."""
        self._count[name] += 1
        return name if self._count[name] == 1 else f"{name}#{self._count[name]}"


def _name(
    capture: Capture, content: tuple[NodeId, ...], names: _Names, label: str, *, is_weights: bool
) -> tuple[str, str, Phase]:
    """Return the module that most of the segment's work belongs to, a unique name, and its part of a whole step."""
    weight_by_side: dict[tuple[str, bool], float] = defaultdict(float)
    for node in content:
        layer = layer_of(capture.nodes[node].module)
        if layer and capture.nodes[node].kind is NodeKind.COMPUTE:
            weight_by_side[layer, capture.nodes[node].is_backward] += 1 + weight_of(capture.nodes[node].work)
    if weight_by_side and label not in (FIRST, LAST):
        module, is_backward = max(weight_by_side, key=lambda side: weight_by_side[side])
        suffix = CASTS * label.endswith(CASTS) or (":weights" if is_weights else ":backward" if is_backward else "")
        return module, names.unique(module + suffix), Phase.BACKWARD if is_backward else Phase.FORWARD
    if label.endswith(UPDATE):
        return label.removesuffix(UPDATE), names.unique(label), Phase.UPDATE
    first = next((n for n in content if capture.nodes[n].kind is NodeKind.COMPUTE), content[0])
    phase = Phase.BACKWARD if capture.nodes[first].is_backward else Phase.FORWARD
    kinds = (part.kind for node in content for part in capture.nodes[node].work.parts)
    known = next((kind for kind in kinds if kind not in (KernelKind.LOOP, KernelKind.LIBRARY)), None)
    what = capture.nodes[first].name if known is None else known.replace(" ", "_")
    return "", names.unique(label if label in (FIRST, LAST) else f"~{what}"), phase
