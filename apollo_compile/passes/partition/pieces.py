"""Pieces: groups of clusters that become segments, contracted where that costs no parallelism."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from apollo_compile.config import PartitionConfig
from apollo_compile.passes.partition.clusters import Clusters
from apollo_compile.passes.partition.labels import CASTS

LAUNCH = 2**20
"""Weight of a piece whose work takes about as long as the launch of a segment."""

LONG = 64
"""Number of clusters above which a piece is not to hold several calls of a layer. Inductor takes more than
proportionally long for long pieces, and pieces with one call each share a body."""

_MANY_CALLS = 4
"""Number of pieces from which a layer is in a loop; forward, backward and weight gradients are three."""

FIRST, LAST = "~first", "~last"
"""Labels of small pieces of any modules that are joined."""


class Pieces:
    """A contractible acyclic graph of pieces; sets of pieces are bit masks over the initial ones."""

    def __init__(self, clusters: Clusters, groups: list[int], labels: list[str], weight: list[float]) -> None:
        count = max(groups, default=-1) + 1
        self.clusters: list[list[int]] = [[] for _ in range(count)]
        self.label = [""] * count
        self.calls: list[set[str]] = [set() for _ in range(count)]
        """Labels of all clusters of every piece."""
        self.apart = [(False, False)] * count
        """Whether nodes must be alone, and whether they are casts of weights; others never join them."""
        self.may_join = [True] * count
        self.draws = [False] * count
        self.weight = [0.0] * count
        self.predecessors: list[set[int]] = [set() for _ in range(count)]
        self.successors: list[set[int]] = [set() for _ in range(count)]
        for cluster, group in enumerate(groups):
            self.clusters[group].append(cluster)
            self.label[group] = labels[cluster]
            self.calls[group].add(labels[cluster])
            self.apart[group] = clusters.are_alone[cluster], labels[cluster].endswith(CASTS)
            self.may_join[group] &= clusters.may_join[cluster] and not labels[cluster].endswith(CASTS)
            self.draws[group] |= clusters.draw[cluster]
            self.weight[group] += weight[cluster]
            for other in clusters.predecessors[cluster]:
                if groups[other] != group:
                    self.predecessors[group].add(groups[other])
                    self.successors[groups[other]].add(group)
        self.total = max(sum(self.weight), 1.0)
        self._looped = _looped_layers(self.label)
        self.alive = set(range(count))
        self._mask = [1 << piece for piece in range(count)]
        self._ancestors = [0] * count
        self._descendants = [0] * count
        order = self.in_topological_order()
        assert len(order) == count, "some groups of clusters wait for each other"
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
        self.calls[u] |= self.calls[v]
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

    def repeats(self, u: int, v: int) -> bool:
        """Whether `u` and `v` together are long, and have several calls of a layer in a loop."""
        again = self.calls[u] & self.calls[v] & self._looped
        is_long = len(self.clusters[u]) + len(self.clusters[v]) > LONG
        return is_long and not again <= {self.label[u]} & {self.label[v]}  # one layer's pieces may meet

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


def _looped_layers(labels: Sequence[str]) -> set[str]:
    """Return the layers with many pieces, given those of all pieces; no modules around layers that have pieces too."""
    many = {label for label, count in Counter(labels).items() if count >= _MANY_CALLS}
    known = set(labels)
    return {label for label in many if not any(other.startswith(f"{label}.") for other in known)}


def join_ends(pieces: Pieces, config: PartitionConfig) -> None:
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
            if not may_join or pieces.share(piece) >= config.min_segment_share or pieces.weight[piece] > LAUNCH:
                continue
            if joined is not None and pieces.share(joined) + pieces.share(piece) < config.min_segment_share:
                pieces.merge(joined, piece)
                pieces.label[joined] = FIRST if first else LAST
            else:
                joined = piece


def contract(pieces: Pieces, config: PartitionConfig, *, named: bool) -> None:
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
            into_u = into_u and pieces.weight[v] <= max(pieces.weight[u], LAUNCH)
        return into_v or into_u

    def admits(rule: Callable[[int, int], bool], u: int, v: int) -> bool:
        return rule(u, v) and (config.min_segment_share == 1 or not pieces.repeats(u, v))

    rules: list[Callable[[int, int], bool]] = [
        lambda u, v: same_label(u, v) and (lossless(u, v) or tiny(u, v)),
        lambda u, v: is_small(u, v) and lossless(u, v),
        tiny,
    ]
    if config.granularity == "module":
        rules.append(lossless)
    changed = True
    while changed:
        changed = any(_apply(pieces, partial(admits, rule)) for rule in rules)


def _apply(pieces: Pieces, rule: Callable[[int, int], bool]) -> bool:
    """Merge along every edge that `rule` admits; return whether there was one."""
    changed = False
    for u in sorted(pieces.alive):
        if u not in pieces.alive:
            continue
        successors = sorted(pieces.successors[u])
        while successors:
            v = successors.pop(0)
            if v in pieces.successors[u] and pieces.apart[u] == pieces.apart[v] and rule(u, v):
                pieces.merge(u, v)
                changed = True
                successors = sorted(pieces.successors[u])
    return changed
