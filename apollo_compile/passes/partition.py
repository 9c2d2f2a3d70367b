"""Stage 1: cut the FX graph into segments.

    (Capture) -> Partition

Nodes that must stay together form clusters, which are never divided: a node with several outputs and its projections,
for example. Clusters are grouped into pieces, and each piece becomes a segment. Cheap nodes (views,
constants) are cloned into every piece that uses them, so that a shared constant makes no two pieces dependent. Pieces
start from layer names where the metadata has them:

1. A cluster's label is the path of its module up to the first number, `encoder.layers.3`. A cluster without one takes
   the label that all its labelled neighbours agree on.
2. Its level is the number of label switches on the longest path from the inputs. Connected clusters of equal label and
   level form a piece; pieces form an acyclic graph, because a path that leaves one reaches higher levels only.
3. Where the graph has no names, every cluster starts as a piece of its own. So do clusters at an end of the graph: next
   to no work precedes or follows them. Thus several calls of one module stay separate although they share the scale of
   a batch norm, or its running statistics.

Then pieces are contracted along edges u -> v, as long as that costs no parallelism:

* lossless: every other predecessor of v precedes u too, and every other successor of u follows v too, so nothing could
  run in parallel at the boundary between them. Applied inside a layer, in graphs without names up to a share of the
  work, and everywhere with granularity "module";
* tiny: one side has next to no work, and would have to wait for the other side anyway.

Of the tiny pieces that are left, those that wait for nothing are joined into one segment in front (`~first`), and those
that nothing waits for into one behind (`~last`): each is read by, or reads from, several independent pieces.

A node that must be alone (`Node.is_alone`) shares a segment only with other such nodes.

In a backward graph, weight gradients are matmuls whose results no other segment needs. As part of their layer they
delay the layers after it; as a segment of their own (`layers.3:weights`) they fill units that the chain of layers
leaves idle, even in a model with a single tower. The price is a segment boundary that fusion does not cross, so with
`weight_gradients` at "auto" both partitions are made, and the caller, who knows the device, selects the better one.

In a backward graph, sums of the gradients of a layer that is called several times are its updates
(`layers.3:update`).

In the graph of a whole step, a layer occurs forward and backward, once for every micro-batch. Forward and backward of a
layer are pieces of their own (`layers.3`, `layers.3:backward`). Nodes that follow the backward of one layer only, and
that no layer waits for, are its updates (`layers.3:update`): sums of its gradients over micro-batches, and the
optimizer's operations on them. Updates of one level are one piece, connected or not; else every parameter would have a
piece.

Guarantees: every compute node is in exactly one segment, the segment graph is acyclic and numbered in a topological
order close to graph order, equal segments share one body. Leaves lanes and start times to the planner.

A pass is one file; this one is long because all its steps work on the same clusters.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from apollo_compile.config import PartitionConfig
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
    Work,
)

_FLOPS_PER_BYTE = 2
"""Flops that take about as long as moving one byte; used to weigh pieces before the device is known."""

_UPDATE = ":update"
"""Suffix of the labels of operations on the gradients of a layer."""

_PLACES = ("pre", "mid", "post")
"""Labels of nodes that belong to no module: before all modules, between them, after them."""

_FIRST, _LAST = "~first", "~last"
"""Labels of small pieces of any modules that are joined."""

_ALONE = "~"
"""Label of nodes that must be alone; no module has this name."""

_LAUNCH = 2**20
"""Weight of a piece whose work takes about as long as the launch of a segment."""

_NAMED_SHARE = 0.5
"""Share of the work that must carry a module's name for layer names to be trusted."""


def partition_graph(
    capture: Capture,
    *,
    config: PartitionConfig | None = None,
    is_better: Callable[[SegmentGraph, SegmentGraph], bool] | None = None,
) -> Partition:
    """Cut `capture` into segments and name the bodies to compile.

    Arguments:
        capture: the graph.
        config: how to cut; the defaults if None.
        is_better: whether the first graph, with weight gradients in segments of their own, is better than the second,
            without; called if `weight_gradients` is "auto" and the two differ. None keeps the second.
    """
    config = config or PartitionConfig()
    may_separate = capture.role in (Role.BACKWARD, Role.STEP) and config.granularity == "layer"
    placement = config.weight_gradients if may_separate else "together"
    if placement == "auto" and is_better is not None:
        apart, together = (_cut(capture, config, separates_weight_gradients=separates) for separates in (True, False))
        return apart if apart != together and is_better(apart.graph, together.graph) else together
    return _cut(capture, config, separates_weight_gradients=placement == "apart")


def _cut(capture: Capture, config: PartitionConfig, *, separates_weight_gradients: bool) -> Partition:
    clusters = _find_clusters(capture)
    labels = _label_clusters(capture, clusters)
    is_update = [False] * len(labels)
    weight = [sum(_weight(capture.nodes[node].work) for node in cluster) for cluster in clusters.members]
    named = sum(w for w, label in zip(weight, labels, strict=True) if label) >= _NAMED_SHARE * sum(weight)
    is_end = [False] * len(labels)
    if named:
        is_end = _find_ends(clusters, weight, min(config.min_segment_share * sum(weight), _LAUNCH))
        if capture.role is Role.STEP:
            labels, is_update = _label_updates(clusters, labels)
        labels = _spread_labels(clusters, labels, is_end)
        if capture.role is Role.BACKWARD:
            is_update = [label.endswith(_UPDATE) for label in labels]
        labels = [_ALONE if alone else label for alone, label in zip(clusters.are_alone, labels, strict=True)]
        is_end = [end and label not in _PLACES for end, label in zip(is_end, labels, strict=True)]
        groups = _group_by_level(clusters, labels, is_update, is_end)
    else:
        labels = [""] * len(labels)
        groups = list(range(len(labels)))
    is_apart = [False] * len(groups)
    if separates_weight_gradients and named:
        is_apart = _find_weight_gradients(capture, clusters, labels, groups, is_update, is_end)
        sides: Sequence[Hashable] = groups if capture.role is Role.STEP else labels  # micro-batches stay apart
        groups = _number(
            (side,) if apart else group for side, group, apart in zip(sides, groups, is_apart, strict=True)
        )
    pieces = _Pieces(clusters, groups, labels, weight)
    _contract(pieces, config, named=named)
    _join_ends(pieces, config)
    _contract(pieces, config, named=named)
    return _build(capture, clusters, pieces, is_apart)


def resize_partition(partition: Partition, capture: Capture) -> Partition:
    """Return the partition with the work and bytes of `capture`, the same graph with other dynamic sizes."""
    nodes = capture.nodes
    num_bytes = {node.name: node.num_bytes for node in nodes}
    ids = {node.name: node.id for node in nodes}
    graph = partition.graph

    def resize(segment: Segment) -> Segment:
        content = [nodes[node] for node in sorted(partition.nodes_by_segment[segment.id])]
        made = [ids[graph.buffers[buffer].name] for buffer in segment.outputs]
        needs = segment_needs(content, outputs=made)
        return replace(segment, work=needs.work, workspace_bytes=needs.workspace_bytes)

    segments = tuple(map(resize, graph.segments))
    buffers = tuple(replace(buffer, num_bytes=num_bytes[buffer.name]) for buffer in graph.buffers)
    return replace(partition, graph=replace(graph, name=capture.name, segments=segments, buffers=buffers))


# -------------------------------------------------------------------------------------------------------- clusters


@dataclass(frozen=True, slots=True)
class _Clusters:
    """The smallest groups of nodes that must stay together, in a topological order, and the edges between them."""

    members: list[list[NodeId]]
    cluster_by_node: dict[NodeId, int]
    predecessors: list[set[int]]
    are_backward: list[bool]
    """Whether autograd made a cluster of a graph with forward and backward."""
    are_alone: list[bool]
    """Whether a cluster shares its segment only with other clusters that must be alone."""
    may_join: list[bool]
    """Whether a cluster may share its segment with others that it has no edges to: it blocks no lane."""
    draw: list[bool]
    """Whether a cluster draws random numbers or has another side effect."""


def _find_clusters(capture: Capture) -> _Clusters:
    """Group projections with their producers, and cheap graph outputs with the node that they are a view of."""
    nodes = capture.nodes
    returned = {node for node in capture.outputs if node is not None and nodes[node].kind is NodeKind.CHEAP}
    members: list[list[NodeId]] = []
    cluster_by_node: dict[NodeId, int] = {}
    sources: list[set[int]] = []
    predecessors: list[set[int]] = []
    for node in nodes:
        producers: set[int] = set().union(*(sources[value] for value in node.inputs)) if node.inputs else set()
        host = None
        if node.kind is NodeKind.PROJECTION:
            host = cluster_by_node[node.inputs[0]]
        elif node.id in returned and len(producers) == 1:
            (host,) = producers
        if node.kind is NodeKind.COMPUTE or (node.id in returned and host is None):
            host = len(members)
            members.append([])
            predecessors.append(set())
        if host is None:
            sources.append(producers)
            continue
        members[host].append(node.id)
        cluster_by_node[node.id] = host
        sources.append({host})
        earlier = {cluster_by_node[value] for value in node.after if value in cluster_by_node}
        predecessors[host] |= (producers | earlier) - {host}
    are_alone = [any(nodes[node].is_alone for node in cluster) for cluster in members]
    are_backward = [nodes[cluster[0]].is_backward for cluster in members]
    may_join = [not any(nodes[node].is_alone or nodes[node].is_collective for node in cluster) for cluster in members]
    draw = [any(nodes[node].keeps_order for node in cluster) for cluster in members]
    return _Clusters(members, cluster_by_node, predecessors, are_backward, are_alone, may_join, draw)


def _weight(work: Work) -> float:
    return work.flops + _FLOPS_PER_BYTE * (work.bytes_read + work.bytes_written)


# ---------------------------------------------------------------------------------------------------------- labels


def layer_of(module: str) -> str:
    """Return the path of the layer that a module belongs to: up to and including its first number, else two names.

    >>> layer_of("text_model.encoder.layers.3.mlp.fc1")
    'text_model.encoder.layers.3'
    >>> layer_of("vision_model.embeddings.patch_embedding")
    'vision_model.embeddings'
    """
    parts = module.split(".") if module else []
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def _label_clusters(capture: Capture, clusters: _Clusters) -> list[str]:
    return [layer_of(capture.nodes[members[0]].module) for members in clusters.members]


def _label_updates(clusters: _Clusters, labels: list[str]) -> tuple[list[str], list[bool]]:
    """Label the updates of every layer of a whole step, and return labels and whether a cluster belongs to updates.

    An update follows the backward of a single layer, for any micro-batches, and no layer waits for it.
    """
    layers: list[set[str]] = []
    """Per cluster, the nearest layers on the paths that lead to it."""
    follows_backward: list[bool] = []
    for cluster, before in enumerate(clusters.predecessors):
        follows_backward.append(clusters.are_backward[cluster] or any(follows_backward[other] for other in before))
        layers.append({labels[cluster]} if labels[cluster] else set().union(*(layers[other] for other in before)))
    successors = _successors(clusters.predecessors)
    is_awaited = [False] * len(labels)
    for cluster in reversed(range(len(labels))):
        is_awaited[cluster] = any(labels[other] or is_awaited[other] for other in successors[cluster])
    found = [
        not label and not awaited and follows and len(only) == 1
        for label, awaited, follows, only in zip(labels, is_awaited, follows_backward, layers, strict=True)
    ]
    updated = [
        f"{min(only)}{_UPDATE}" if each else label for label, each, only in zip(labels, found, layers, strict=True)
    ]
    return updated, found


def _find_ends(clusters: _Clusters, weight: list[float], limit: float) -> list[bool]:
    """Return whether a cluster is at an end of the graph: with the work before or after it, it weighs below `limit`.

    A backward cluster of a step with little work before it is no end: it stays with the backward that reads it.
    """

    def add_up(neighbours: Sequence[Iterable[int]], order: Iterable[int]) -> list[float]:
        total = list(weight)  # a cluster that is reached on several paths counts once for each
        for cluster in order:
            total[cluster] += sum(total[other] for other in neighbours[cluster])
        return total

    order = range(len(weight))
    before = add_up(clusters.predecessors, order)
    after = add_up(_successors(clusters.predecessors), reversed(order))
    first = [total < limit and not backward for total, backward in zip(before, clusters.are_backward, strict=True)]
    return [is_first or total < limit for is_first, total in zip(first, after, strict=True)]


def _spread_labels(clusters: _Clusters, labels: list[str], is_end: list[bool]) -> list[str]:
    """Give clusters without a label the label of the only labelled piece next to them: on both sides, before, or after.

    Pieces are counted, not labels: the sum of the gradients of a layer that is used twice belongs to neither use, or it
    would make the two uses dependent. A cluster that follows several uses of one layer, and that nothing waits for, is
    labelled as an update. Pieces at an end of the graph count where there are no others.
    """
    successors = _successors(clusters.predecessors)
    keys = _keys(clusters, labels)
    piece = _connect(clusters, keys, is_end)
    ends: dict[Hashable, int] = {}
    piece = [ends.setdefault(keys[first], first) if is_end[first] else first for first in piece]

    def nearest(neighbours: Sequence[Iterable[int]], cluster: int) -> set[int]:
        found = _nearest(neighbours, labels, piece, cluster)
        return {first for first in found if not is_end[first]} or found

    spread = []
    for cluster, label in enumerate(labels):
        if not label:
            before, after = nearest(clusters.predecessors, cluster), nearest(successors, cluster)
            only = next((around for around in (before | after, before, after) if len(around) == 1), None)
            place = _PLACES[0 if not before else 2 if not after else 1]
            label = place if only is None else labels[only.pop()]
            if only is None and not after and len(layers := {labels[first] for first in before}) == 1:
                label = f"{layers.pop()}{_UPDATE}"
        spread.append(label)
    return spread


def _nearest(neighbours: Sequence[Iterable[int]], labels: list[str], piece: list[int], cluster: int) -> set[int]:
    """Return the nearest labelled pieces on the paths from `cluster` along `neighbours`."""
    found: set[int] = set()
    seen = {cluster}
    stack = list(neighbours[cluster])
    while stack:
        other = stack.pop()
        if other in seen:
            continue
        seen.add(other)
        if labels[other]:
            found.add(piece[other])
        else:
            stack.extend(neighbours[other])
    return found


def _connect(clusters: _Clusters, keys: Sequence[Hashable], is_end: list[bool]) -> list[int]:
    """Return for every cluster the first cluster of its piece, a component connected by edges between equal keys.

    Clusters at an end of the graph connect nothing; each is a piece.
    """
    root = list(range(len(keys)))

    def find(cluster: int) -> int:
        while root[cluster] != cluster:
            cluster = root[cluster]
        return cluster

    for cluster, before in enumerate(clusters.predecessors):
        for other in before:
            if keys[other] == keys[cluster] and not is_end[other] and not is_end[cluster]:
                first, second = sorted((find(cluster), find(other)))
                root[second] = first
    return [find(cluster) for cluster in range(len(keys))]


def _successors(predecessors: Sequence[Iterable[int]]) -> list[set[int]]:
    successors: list[set[int]] = [set() for _ in predecessors]
    for cluster, before in enumerate(predecessors):
        for other in before:
            successors[other].add(cluster)
    return successors


def _group_by_level(clusters: _Clusters, labels: list[str], is_update: list[bool], is_end: list[bool]) -> list[int]:
    """Return the group of every cluster: connected clusters of one label and one level, forward and backward apart.

    A cluster's level is the number of label switches on the longest path to it. A backward cluster that reads values of
    the forward only, such as a mask, moves up to the level of its users, or it would be computed in the forward and
    kept. Updates need not be connected.
    """
    keys = _keys(clusters, labels)
    level: list[int] = []
    for cluster, before in enumerate(clusters.predecessors):
        level.append(max((level[other] + (keys[other] != keys[cluster]) for other in before), default=0))
    for cluster, after in reversed(list(enumerate(_successors(clusters.predecessors)))):
        if clusters.are_backward[cluster] and after and all(keys[other] == keys[cluster] for other in after):
            level[cluster] = min(level[other] for other in after)
    at_level: list[Hashable] = list(zip(keys, level, strict=True))
    connected = _connect(clusters, at_level, is_end)
    return _number(key if loose else piece for key, loose, piece in zip(at_level, is_update, connected, strict=True))


def _keys(clusters: _Clusters, labels: list[str]) -> list[Hashable]:
    """Return the labels, distinct for forward and backward."""
    return list(zip(labels, clusters.are_backward, strict=True))


# ------------------------------------------------------------------------------------------------ weight gradients


def _find_weight_gradients(
    capture: Capture,
    clusters: _Clusters,
    labels: list[str],
    groups: list[int],
    is_update: list[bool],
    is_end: list[bool],
) -> list[bool]:
    """Return for every cluster whether it belongs to the weight gradients of its layer, as far as other matmuls remain.

    A matmul is a weight gradient if no other matmul and no other group depends on it, updates aside. Its successors in
    its group belong to it, and so do predecessors that nothing else needs.
    """
    successors, order = _successors(clusters.predecessors), range(len(groups))
    is_matmul = [_is_matmul(capture, members) for members in clusters.members]
    may_be = [capture.role is Role.BACKWARD or backward for backward in clusters.are_backward]
    stays_in_group, has_no_later_matmul, found = [False] * len(groups), [False] * len(groups), [False] * len(groups)
    for cluster in reversed(order):
        after = successors[cluster]
        stays_in_group[cluster] = all(
            is_update[other] or (stays_in_group[other] and (is_end[other] or groups[other] == groups[cluster]))
            for other in after
        )
        has_no_later_matmul[cluster] = all(has_no_later_matmul[other] and not is_matmul[other] for other in after)
        is_last = stays_in_group[cluster] and has_no_later_matmul[cluster]
        found[cluster] = is_matmul[cluster] and is_last and may_be[cluster] and not is_update[cluster]
    for cluster in order:
        follows = any(found[other] for other in clusters.predecessors[cluster])
        found[cluster] = found[cluster] or (follows and not is_update[cluster])
    for cluster in reversed(order):
        has_successors = bool(successors[cluster])
        is_for_them = has_successors and stays_in_group[cluster] and all(found[other] for other in successors[cluster])
        found[cluster] = found[cluster] or (is_for_them and not is_matmul[cluster])
    keys = _keys(clusters, labels)
    keep_matmuls = {keys[cluster] for cluster in order if is_matmul[cluster] and not found[cluster]}
    return [found[cluster] and keys[cluster] in keep_matmuls for cluster in order]


def _is_matmul(capture: Capture, members: list[NodeId]) -> bool:
    return any(part.kind is KernelKind.MATMUL for node in members for part in capture.nodes[node].work.parts)


def _number(keys: Iterable[Hashable]) -> list[int]:
    """Number the distinct keys by first occurrence, and return the number of every key."""
    number_by_key: dict[Hashable, int] = {}
    return [number_by_key.setdefault(key, len(number_by_key)) for key in keys]


# ---------------------------------------------------------------------------------------------------------- pieces


class _Pieces:
    """A contractible acyclic graph of pieces; sets of pieces are bit masks over the initial ones."""

    def __init__(self, clusters: _Clusters, groups: list[int], labels: list[str], weight: list[float]) -> None:
        count = max(groups, default=-1) + 1
        self.clusters: list[list[int]] = [[] for _ in range(count)]
        self.label = [""] * count
        self.is_alone = [False] * count
        self.may_join = [True] * count
        self.draws = [False] * count
        self.weight = [0.0] * count
        self.predecessors: list[set[int]] = [set() for _ in range(count)]
        self.successors: list[set[int]] = [set() for _ in range(count)]
        for cluster, group in enumerate(groups):
            self.clusters[group].append(cluster)
            self.label[group] = labels[cluster]
            self.is_alone[group] = clusters.are_alone[cluster]
            self.may_join[group] &= clusters.may_join[cluster]
            self.draws[group] |= clusters.draw[cluster]
            self.weight[group] += weight[cluster]
            for other in clusters.predecessors[cluster]:
                if groups[other] != group:
                    self.predecessors[group].add(groups[other])
                    self.successors[groups[other]].add(group)
        self.total = max(sum(self.weight), 1.0)
        self.alive = set(range(count))
        self._mask = [1 << piece for piece in range(count)]
        self._ancestors = [0] * count
        self._descendants = [0] * count
        order = self.in_topological_order()
        for piece in order:
            for other in self.predecessors[piece]:
                self._ancestors[piece] |= self._ancestors[other] | self._mask[other]
        for piece in reversed(order):
            for other in self.successors[piece]:
                self._descendants[piece] |= self._descendants[other] | self._mask[other]

    def share(self, piece: int) -> float:
        """Return the share of `piece` in the graph's work, 0 to 1."""
        return self.weight[piece] / self.total

    def only_enters(self, u: int, v: int) -> bool:
        """Whether every other predecessor of `v` precedes `u` too, so that v could start no earlier without u."""
        return all(other == u or self._mask[other] & self._ancestors[u] for other in self.predecessors[v])

    def only_leaves(self, u: int, v: int) -> bool:
        """Whether every other successor of `u` follows `v` too, so that nothing waits longer if u ends with v."""
        return all(other == v or self._mask[other] & self._descendants[v] for other in self.successors[u])

    def merge(self, u: int, v: int) -> None:
        """Contract the edge u -> v into u; the caller has shown that no other path leads from u to v."""
        self.clusters[u] += self.clusters[v]
        if self.weight[v] > self.weight[u]:
            self.label[u] = self.label[v]
        self.weight[u] += self.weight[v]
        self.may_join[u] &= self.may_join[v]
        self.draws[u] |= self.draws[v]
        for other in self.predecessors[v]:
            self.successors[other].discard(v)
            if other != u:
                self.successors[other].add(u)
                self.predecessors[u].add(other)
        for other in self.successors[v]:
            self.predecessors[other].discard(v)
            self.predecessors[other].add(u)
            self.successors[u].add(other)
        self.alive.discard(v)
        self._mask[u] |= self._mask[v]
        self._ancestors[u] = (self._ancestors[u] | self._ancestors[v]) & ~self._mask[u]
        self._descendants[u] = (self._descendants[u] | self._descendants[v]) & ~self._mask[u]
        above, below = self._ancestors[u] | self._mask[u], self._descendants[u] | self._mask[u]
        for other in self.alive:
            if self._mask[other] & self._descendants[u]:
                self._ancestors[other] |= above
            if self._mask[other] & self._ancestors[u]:
                self._descendants[other] |= below

    def in_topological_order(self) -> list[int]:
        """Return the pieces in the topological order that is closest to graph order."""
        missing = {piece: len(self.predecessors[piece]) for piece in self.alive}
        ready = [(min(self.clusters[piece]), piece) for piece in self.alive if not missing[piece]]
        heapq.heapify(ready)
        order = []
        while ready:
            _, piece = heapq.heappop(ready)
            order.append(piece)
            for other in self.successors[piece]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, (min(self.clusters[other]), other))
        return order


def _join_ends(pieces: _Pieces, config: PartitionConfig) -> None:
    """Join tiny pieces without predecessors into one, and tiny pieces without successors into another.

    Each has several independent neighbours, or it would have been merged with one of them.
    """
    for first in (True, False):
        inner, outer = pieces.predecessors, pieces.successors
        if not first:
            inner, outer = outer, inner
        joined: int | None = None
        for piece in pieces.in_topological_order():
            may_join = not inner[piece] and (outer[piece] or not first) and pieces.may_join[piece]
            if not may_join or pieces.share(piece) >= config.min_segment_share or pieces.weight[piece] > _LAUNCH:
                continue
            if joined is not None and pieces.share(joined) + pieces.share(piece) < config.min_segment_share:
                pieces.merge(joined, piece)
                pieces.label[joined] = _FIRST if first else _LAST
            else:
                joined = piece


def _contract(pieces: _Pieces, config: PartitionConfig, *, named: bool) -> None:
    """Contract edges, those inside a layer first, until no rule applies."""

    def same_label(u: int, v: int) -> bool:
        return named and pieces.label[u] == pieces.label[v]

    def lossless(u: int, v: int) -> bool:
        return pieces.only_enters(u, v) and pieces.only_leaves(u, v)

    def is_small(u: int, v: int) -> bool:
        return not named and pieces.share(u) + pieces.share(v) <= config.max_segment_share

    def tiny(u: int, v: int) -> bool:
        into_v = pieces.share(u) < config.min_segment_share and pieces.only_leaves(u, v)
        into_u = pieces.share(v) < config.min_segment_share and pieces.only_enters(u, v)
        if pieces.draws[u]:  # seeds are read by many modules, which would all wait for v
            into_u = into_u and pieces.weight[v] <= max(pieces.weight[u], _LAUNCH)
        return into_v or into_u

    rules: list[Callable[[int, int], bool]] = [
        lambda u, v: same_label(u, v) and (lossless(u, v) or tiny(u, v)),
        lambda u, v: is_small(u, v) and lossless(u, v),
        tiny,
    ]
    if config.granularity == "module":
        rules.append(lossless)
    changed = True
    while changed:
        changed = any(_apply(pieces, rule) for rule in rules)


def _apply(pieces: _Pieces, rule: Callable[[int, int], bool]) -> bool:
    """Merge along every edge that `rule` admits; return whether there was one."""
    changed = False
    for u in sorted(pieces.alive):
        if u not in pieces.alive:
            continue
        successors = sorted(pieces.successors[u])
        while successors:
            v = successors.pop(0)
            if v in pieces.successors[u] and pieces.is_alone[u] == pieces.is_alone[v] and rule(u, v):
                pieces.merge(u, v)
                changed = True
                successors = sorted(pieces.successors[u])
    return changed


# -------------------------------------------------------------------------------------------------------- segments


def _build(capture: Capture, clusters: _Clusters, contracted: _Pieces, is_apart: list[bool]) -> Partition:
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
            key,
            Body(id=BodyId(len(bodies)), name=name, nodes=content, inputs=needed[s], outputs=made[s]),
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


def _with_clones(nodes: Sequence[Node], clusters: _Clusters, piece: list[int]) -> tuple[NodeId, ...]:
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
            weight_by_side[layer, capture.nodes[node].is_backward] += 1 + _weight(capture.nodes[node].work)
    if weight_by_side and label not in (_FIRST, _LAST):
        module, is_backward = max(weight_by_side, key=lambda side: weight_by_side[side])
        suffix = ":weights" if is_weights else ":backward" if is_backward else ""
        return module, names.unique(module + suffix), Phase.BACKWARD if is_backward else Phase.FORWARD
    if label.endswith(_UPDATE):
        return label.removesuffix(_UPDATE), names.unique(label), Phase.UPDATE
    first = next((n for n in content if capture.nodes[n].kind is NodeKind.COMPUTE), content[0])
    phase = Phase.BACKWARD if capture.nodes[first].is_backward else Phase.FORWARD
    return "", names.unique(label if label in (_FIRST, _LAST) else f"~{capture.nodes[first].name}"), phase
