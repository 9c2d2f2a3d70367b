"""Free devices of a cluster, by node.

    room = Room(cluster);  nodes = room.take(gang);  room.give(gang.kind, nodes)

A gang of at most one node's devices takes the fullest node that has them free. A larger one takes whole free nodes, and
its rest from the fullest node that has it.
"""

from __future__ import annotations

from collections.abc import Iterable

from apollo_compile.cluster.values import Cluster, Gang

Nodes = tuple[tuple[int, int], ...]
"""Index of a node among those of its kind, and devices on it."""


class Room:
    """Free devices; `take` and `give` change it."""

    def __init__(self, cluster: Cluster) -> None:
        self._size = {nodes.kind: nodes.devices for nodes in cluster.nodes}
        self._free = {nodes.kind: [nodes.devices] * nodes.count for nodes in cluster.nodes}

    def free(self, kind: str) -> int:
        """Return the number of free devices of a kind."""
        return sum(self._free[kind])

    def find(self, gang: Gang) -> Nodes | None:
        """Return the nodes that `gang` would take; None if it does not fit now."""
        free, size = self._free.get(gang.kind), self._size.get(gang.kind, 1)
        if free is None:
            return None
        num_whole, rest = divmod(gang.devices, size)
        whole = [node for node, devices in enumerate(free) if devices == size][:num_whole]
        if len(whole) < num_whole:
            return None
        found = [(node, size) for node in whole]
        if rest:
            able = [(devices, node) for node, devices in enumerate(free) if devices >= rest and node not in whole]
            if not able:
                return None
            found.append((min(able)[1], rest))
        return tuple(found)

    def take(self, gang: Gang) -> Nodes | None:
        """Take the devices of a gang and return their nodes; None, and nothing is taken, if it does not fit now."""
        found = self.find(gang)
        for node, devices in found or ():
            self._free[gang.kind][node] -= devices
        return found

    def give(self, kind: str, nodes: Iterable[tuple[int, int]]) -> None:
        """Return devices."""
        for node, devices in nodes:
            self._free[kind][node] += devices
