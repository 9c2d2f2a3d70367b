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

Small steps of a loop, such as those of a recurrent model, would all be one piece. A piece of many nodes does not take
in another call of a layer of the loop: so there is a piece for every few steps, and these share a body.

A node that must be alone (`Node.is_alone`) shares a segment only with other such nodes.

In a backward graph, weight gradients are matmuls whose results no other segment needs. As part of their layer they
delay the layers after it; as a segment of their own (`layers.3:weights`) they fill units that the chain of layers
leaves idle, even in a model with a single tower. The price is a segment boundary that fusion does not cross, so with
`weight_gradients` at "auto" both partitions are made, and the caller, who knows the device, selects the better one.

Under autocast, a forward casts the weights of its matmuls. With `casts` at "apart", those of a layer are a
segment of their own (`layers.3:casts`), which a step of several micro-batches runs once.

In a backward graph, sums of the gradients of a layer that is called several times are its updates
(`layers.3:update`).

In the graph of a whole step, a layer occurs forward and backward, once for every micro-batch. Forward and backward of a
layer are pieces of their own (`layers.3`, `layers.3:backward`). Nodes that follow the backward of one layer only, and
that no layer waits for, are its updates (`layers.3:update`): sums of its gradients over micro-batches, and the
optimizer's operations on them. Updates of one level are one piece, connected or not; else every parameter would have a
piece.

Guarantees: every compute node is in exactly one segment, the segment graph is acyclic and numbered in a topological
order close to graph order, equal segments share one body. Leaves lanes and start times to the planner.

The steps are in the order of use: clusters.py, labels.py, pieces.py, segments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from apollo_compile.config import PartitionConfig
from apollo_compile.cost_model.fusion import segment_needs
from apollo_compile.ir import Capture, Partition, Role, Segment, SegmentGraph
from apollo_compile.passes.partition.clusters import find_clusters, weight_of
from apollo_compile.passes.partition.labels import (
    CASTS,
    PLACES,
    UPDATE,
    find_ends,
    find_weight_casts,
    find_weight_gradients,
    group_apart,
    group_by_level,
    label_clusters,
    label_updates,
    number,
    spread_labels,
)
from apollo_compile.passes.partition.pieces import LAUNCH, Pieces, contract, join_ends
from apollo_compile.passes.partition.segments import build

_NAMED_SHARE = 0.5
"""Share of the work that must carry a module's name for layer names to be trusted."""


_ALONE = "~"
"""Label of nodes that must be alone; no module has this name."""


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
    clusters = find_clusters(capture)
    labels = label_clusters(capture, clusters)
    is_update = [False] * len(labels)
    weight = [sum(weight_of(capture.nodes[node].work) for node in cluster) for cluster in clusters.members]
    named = sum(w for w, label in zip(weight, labels, strict=True) if label) >= _NAMED_SHARE * sum(weight)
    is_end = [False] * len(labels)
    if named:
        is_end = find_ends(clusters, weight, min(config.min_segment_share * sum(weight), LAUNCH))
        if capture.role is Role.STEP:
            labels, is_update = label_updates(clusters, labels)
        labels = spread_labels(clusters, labels, is_end)
        if capture.role is Role.BACKWARD:
            is_update = [label.endswith(UPDATE) for label in labels]
        labels = [_ALONE if alone else label for alone, label in zip(clusters.are_alone, labels, strict=True)]
        is_end = [end and label not in PLACES for end, label in zip(is_end, labels, strict=True)]
        groups = group_by_level(clusters, labels, is_update, is_end)
    else:
        labels = [""] * len(labels)
        groups = list(range(len(labels)))
    is_apart = [False] * len(groups)
    if separates_weight_gradients and named:
        is_apart = find_weight_gradients(capture, clusters, labels, groups, is_update, is_end)
        # micro-batches of a step stay apart
        sides = groups if capture.role is Role.STEP else group_apart(clusters, labels, is_apart)
        groups = number((side,) if apart else group for side, group, apart in zip(sides, groups, is_apart, strict=True))
    if config.casts == "apart" and named and capture.role is Role.FORWARD:
        is_cast = find_weight_casts(capture, clusters)
        labels = [label + CASTS * cast for label, cast in zip(labels, is_cast, strict=True)]
        groups = number((label,) if cast else group for label, group, cast in zip(labels, groups, is_cast, strict=True))
    pieces = Pieces(clusters, groups, labels, weight)
    contract(pieces, config, named=named)
    join_ends(pieces, config)
    contract(pieces, config, named=named)
    return build(capture, clusters, pieces, is_apart)


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
