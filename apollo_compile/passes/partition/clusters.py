"""Clusters: nodes of a graph that must stay in one segment."""

from __future__ import annotations

from dataclasses import dataclass

from apollo_compile.ir import Capture, NodeId, NodeKind, Work

_FLOPS_PER_BYTE = 2
"""Flops that take about as long as moving one byte; used to weigh pieces before the device is known."""


@dataclass(frozen=True, slots=True)
class Clusters:
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


def find_clusters(capture: Capture) -> Clusters:
    """Group projections with their producers, and parts and cheap graph outputs with the node that they are a view of.

    Parts of inputs are a cluster.
    """
    nodes = capture.nodes
    returned = {node for node in capture.outputs if node is not None and nodes[node].kind is NodeKind.CHEAP}
    members: list[list[NodeId]] = []
    cluster_by_node: dict[NodeId, int] = {}
    sources: list[set[int]] = []
    predecessors: list[set[int]] = []
    parts_of_inputs: int | None = None
    for node in nodes:
        producers: set[int] = set().union(*(sources[value] for value in node.inputs)) if node.inputs else set()
        host = None
        if node.kind is NodeKind.PROJECTION:
            host = cluster_by_node[node.inputs[0]]
        elif (node.id in returned or node.kind is NodeKind.PART) and len(producers) == 1:
            (host,) = producers
        elif node.kind is NodeKind.PART:
            host = parts_of_inputs
        if host is None and (node.id in returned or node.kind in (NodeKind.COMPUTE, NodeKind.PART)):
            host = len(members)
            if node.kind is NodeKind.PART:
                parts_of_inputs = host
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
    return Clusters(members, cluster_by_node, predecessors, are_backward, are_alone, may_join, draw)


def weight_of(work: Work) -> float:
    """Return the weight of work: flops, and bytes as flops."""
    return work.flops + _FLOPS_PER_BYTE * (work.bytes_read + work.bytes_written)
