"""Work of a segment after fusion: its kernels, and the bytes that move between them.

    segment_needs(nodes, outputs) -> Work, and the bytes of its workspace

Inductor turns chains of pointwise operators, reductions, gathers and copies into one loop; matmuls, convolutions,
attention, sorts and scatters are calls or loops of their own. So a segment is cut into groups:

1. The depth of a node is the number of unfusible nodes on the longest path to it inside the segment.
2. Fusible nodes of equal depth that are connected by an edge, or that read the same value, form one group; an unfusible
   node is a group alone. Groups of equal depth cannot form a cycle, because an unfusible node between two nodes makes
   their depths differ. A group whose readers are all in one fusible group then joins that group: no path can leave it
   and come back. (Such groups come from activations that a backward recomputes long before they are needed.)
3. Views are free and are replaced by their base. Constants are recomputed by every group that reads them.
4. A value is read once by each group that reads it and does not make it, and written once if another group reads it,
   if it is an output of the segment, or if nothing in the segment reads it. Values inside a group move no bytes.
5. Groups run one after the other, in graph order as far as dependencies allow. A value that is written and not an
   output takes memory from the group that makes it to the last group that reads it; the peak of that memory is the
   workspace.

Work = flops of all nodes, bytes of these reads and writes, and one kernel per group of fusible nodes; an unfusible node
launches the kernels of its formula. `Work.parts` lists the kernels, with the bytes that each reads from outside.

The approximation is that a group is one kernel. That holds for Inductor's C++ backend, which puts loops that follow one
another into one function, where the second loop still finds its data in the cache. Triton makes a kernel per loop, so a
reduction over columns and one over rows of the same value are two kernels there. The epilogue of a matmul is a kernel
of its own here. On the training graphs of CLIP and of two towers the number of groups was within a tenth of the number
of Inductor's C++ functions. A node does not know the size of a value from outside the segment: it is taken to be the
bytes that its readers read beyond the values made inside.

Segments that are mostly loops have the largest errors: on two cores, over the workloads of the benchmarks, the
median error of their predicted times was 21 to 37 %, against 10 to 13 % for segments that are mostly matmuls.
This file does not import torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from apollo_compile.ir import Kernel, KernelKind, Node, NodeId, NodeKind, Work, merge_kernels
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import find_operator


class Needs(NamedTuple):
    """Work and workspace of a segment."""

    work: Work
    workspace_bytes: int
    """Peak bytes of values between its groups."""


def segment_needs(nodes: Sequence[Node], *, outputs: Collection[NodeId] = ()) -> Needs:
    """Return the needs of the segment made of `nodes`, in graph order.

    `outputs` are nodes that the segment returns although nodes inside it read them, for example activations that are
    saved for the backward pass. Nodes without a reader inside are outputs anyway.
    """
    fused = _fuse(nodes, outputs)
    kernels = _kernels(nodes, fused)
    work = Work(
        flops=sum(node.work.flops for node in nodes),
        bytes_read=sum(fused.reads.values()),
        bytes_written=sum(fused.values.written_by(node) for node in sorted(fused.written)),
        kernels=sum(kernel.launches for kernel in kernels),
        parts=merge_kernels(kernels),
    )
    return Needs(work, _workspace(fused, outputs))


def _workspace(fused: _Fused, outputs: Collection[NodeId]) -> int:
    position = {group: number for number, group in enumerate(fused.in_order())}
    last_read: dict[NodeId, int] = {}
    for group, value in fused.reads:
        last_read[value] = max(position[group], last_read.get(value, 0))
    changes = []
    for value in fused.written & last_read.keys() - {fused.values.origin(output) for output in outputs}:
        num_bytes = fused.values.node(value).num_bytes
        # a group holds its inputs until it has run
        changes += [(position[fused.group_by_node[value]], 0, num_bytes), (last_read[value], 1, -num_bytes)]
    return max(itertools.accumulate(change for *_, change in sorted(changes)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """The groups of a segment and the values that move between them."""

    values: _Values
    group_by_node: dict[NodeId, NodeId]
    reads: dict[tuple[NodeId, NodeId], int]
    """Bytes by group and value."""
    written: set[NodeId]

    def in_order(self) -> list[NodeId]:
        """Return the groups in topological order; ready groups are in graph order."""
        missing: dict[NodeId, set[NodeId]] = {group: set() for group in self.group_by_node.values()}
        readers: dict[NodeId, set[NodeId]] = defaultdict(set)
        for group, value in self.reads:
            if value in self.group_by_node:
                missing[group].add(self.group_by_node[value])
                readers[self.group_by_node[value]].add(group)
        ready = sorted(group for group, producers in missing.items() if not producers)
        found: list[NodeId] = []
        while ready:
            found.append(heapq.heappop(ready))
            for reader in readers[found[-1]]:
                missing[reader].discard(found[-1])
                if not missing[reader]:
                    heapq.heappush(ready, reader)
        assert len(found) == len(missing)  # groups form no cycle
        return found


def _fuse(nodes: Sequence[Node], outputs: Collection[NodeId]) -> _Fused:
    values = _Values(nodes)
    group_by_node = _group(nodes, values)
    reads: dict[tuple[NodeId, NodeId], int] = {}
    is_read: set[NodeId] = set()
    crosses: set[NodeId] = {values.origin(output) for output in outputs}
    for node in nodes:
        group = group_by_node.get(node.id)
        if group is None:
            continue
        for value, num_bytes in values.read_by(node).items():
            is_read.add(value)
            if group_by_node.get(value, value) == group:
                continue
            crosses.add(value)
            if values.is_constant(value) and find_operator(node.target).is_fusible:
                continue  # computed in the reader's loop
            reads[group, value] = max(num_bytes, reads.get((group, value), 0))
    for constant in sorted({value for _, value in reads if values.is_constant(value)}):
        group_by_node[constant] = constant  # made in memory by a loop of its own
        crosses.add(constant)
    written = {node for node in group_by_node if node in crosses or node not in is_read}
    return _Fused(values=values, group_by_node=group_by_node, reads=reads, written=written)


def _kernels(nodes: Sequence[Node], fused: _Fused) -> list[Kernel]:
    """Return one kernel per group, in order of their first nodes."""
    values, group_by_node = fused.values, fused.group_by_node
    flops: dict[NodeId, int] = defaultdict(int)
    moved: dict[NodeId, int] = defaultdict(int)
    from_outside: dict[NodeId, int] = defaultdict(int)
    for node in nodes:
        if node.id in group_by_node:
            flops[group_by_node[node.id]] += node.work.flops
            moved[group_by_node[node.id]] += values.written_by(node.id) if node.id in fused.written else 0
    for (group, value), num_bytes in fused.reads.items():
        moved[group] += num_bytes
        if value not in group_by_node:
            from_outside[group] += num_bytes
    kernels = []
    for group in sorted(set(group_by_node.values())):
        first = values.node(group).work.parts or (Kernel(),)
        is_alone = not _is_open(values, group)
        kernels.append(
            Kernel(
                kind=first[0].kind if is_alone else KernelKind.LOOP,
                dtype=first[0].dtype,
                flops=flops[group],
                bytes_moved=moved[group],
                bytes_from_outside=from_outside[group],
                tiles=first[0].tiles if is_alone else 0,
                launches=first[0].launches if is_alone else 1,
            )
        )
    return kernels


def _group(nodes: Sequence[Node], values: _Values) -> dict[NodeId, NodeId]:
    """Return the group of every node that has a cost; a group is named by its first node."""
    groups = _DisjointSets()
    depth: dict[NodeId, int] = {}
    reader_at: dict[tuple[int, NodeId], NodeId] = {}
    for node in nodes:
        if not values.costs(node.id):
            continue
        groups.add(node.id)
        read = values.read_by(node)
        depth[node.id] = max(
            (depth[value] + (not _is_open(values, value)) for value in read if value in depth), default=0
        )
        if not find_operator(node.target).is_fusible:
            continue
        for value in read:
            if depth.get(value) == depth[node.id] and _is_open(values, value):
                groups.unite(value, node.id)
            elif not values.is_constant(value):
                groups.unite(reader_at.setdefault((depth[node.id], value), node.id), node.id)
    _join_only_readers(nodes, values, groups)
    return {node: groups.find(node) for node in depth}


def _join_only_readers(nodes: Sequence[Node], values: _Values, groups: _DisjointSets) -> None:
    readers: dict[NodeId, set[NodeId]] = defaultdict(set)
    members: dict[NodeId, list[NodeId]] = defaultdict(list)
    costly = [node for node in nodes if values.costs(node.id)]
    for node in costly:
        members[groups.find(node.id)].append(node.id)
        for value in values.read_by(node):
            readers[value].add(node.id)
    for group in sorted(members, reverse=True):  # readers first, so that a chain joins from its end
        if not _is_open(values, group):
            continue
        outside = {groups.find(reader) for member in members[group] for reader in readers[member]} - {
            groups.find(group)
        }
        if len(outside) == 1 and _is_open(values, target := outside.pop()):
            joined = members.pop(group) + members.pop(target)
            groups.unite(group, target)
            members[groups.find(group)] = joined


def _is_open(values: _Values, value: NodeId) -> bool:
    return find_operator(values.node(value).target).is_fusible


class _DisjointSets:
    """Sets of nodes that can be united; the smallest node names its set."""

    def __init__(self) -> None:
        self._parent: dict[NodeId, NodeId] = {}

    def add(self, node: NodeId) -> None:
        self._parent[node] = node

    def find(self, node: NodeId) -> NodeId:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def unite(self, first: NodeId, second: NodeId) -> None:
        first, second = sorted((self.find(first), self.find(second)))
        self._parent[second] = first


class _Values:
    """The values of a segment, with views resolved to the values that they are views of."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._node_by_id = {node.id: node for node in nodes}
        self._origin: dict[NodeId, NodeId] = {}
        self._size: dict[NodeId, int] = {}
        self._reads: dict[NodeId, dict[NodeId, int]] = {}
        for node in nodes:  # graph order: inputs are resolved before their readers
            self._resolve(node)
        for node in nodes:
            if self.costs(node.id):
                self._reads[node.id] = self._measure_reads(node)

    def node(self, value: NodeId) -> Node:
        return self._node_by_id[value]

    def origin(self, value: NodeId) -> NodeId:
        """Return the node that computed the value: the value itself unless it is a view."""
        return self._origin.get(value, value)

    def costs(self, value: NodeId) -> bool:
        """Whether the node is computed in this segment and is neither a view nor a constant."""
        return self._origin.get(value) == value and not self.is_constant(value) and self._is_computed(value)

    def is_constant(self, value: NodeId) -> bool:
        node = self._node_by_id.get(value)
        return node is not None and find_operator(node.target).kind is WorkKind.CONSTANT

    def read_by(self, node: Node) -> dict[NodeId, int]:
        """Return the bytes that a node reads, by the node that computed them."""
        return self._reads[node.id]

    def written_by(self, value: NodeId) -> int:
        node = self._node_by_id[value]
        return node.work.bytes_written or node.num_bytes

    def _is_computed(self, value: NodeId) -> bool:
        node = self._node_by_id[value]
        return node.kind is not NodeKind.INPUT and bool(
            node.work.flops or node.work.bytes_written or node.work.bytes_read
        )

    def _resolve(self, node: Node) -> None:
        self._origin[node.id] = node.id
        self._size[node.id] = node.num_bytes
        if find_operator(node.target).kind is WorkKind.VIEW and node.inputs:
            viewed = node.inputs[0]
            self._origin[node.id] = self.origin(viewed)
            # An expanded view has more elements than bytes in memory; a slice has fewer bytes than its base.
            self._size[node.id] = min(node.num_bytes, self._size.get(viewed, node.num_bytes))

    def _measure_reads(self, node: Node) -> dict[NodeId, int]:
        reads: dict[NodeId, int] = defaultdict(int)
        outside: list[NodeId] = []
        for value in node.inputs:
            if value in self._size:
                # A gather reads only part of its input.
                num_bytes = min(self._size[value], node.work.bytes_read)
                reads[self.origin(value)] = max(reads[self.origin(value)], num_bytes)
            else:
                outside.append(value)
        remaining = max(node.work.bytes_read - sum(reads.values()), 0)
        for value in outside:
            reads[value] = remaining // len(outside)
        return dict(reads)
