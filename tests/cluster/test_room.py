"""Free devices by node."""

from __future__ import annotations

import random

from apollo_compile.cluster.simulate import Room
from apollo_compile.cluster.values import Cluster, Gang, Nodes

CLUSTER = Cluster(nodes=(Nodes(kind="gpu", count=3, devices=4),))


def gang(devices: int, kind: str = "gpu") -> Gang:
    """Return a gang of any speed."""
    return Gang(kind=kind, devices=devices, step_s=1.0)


def test_a_small_gang_takes_the_fullest_node_that_has_room() -> None:
    """So that whole nodes stay free for large gangs."""
    room = Room(CLUSTER)
    assert room.take(gang(3)) == ((0, 3),)
    assert room.take(gang(2)) == ((1, 2),)
    assert room.take(gang(1)) == ((0, 1),)
    assert room.take(gang(2)) == ((1, 2),)
    assert room.free("gpu") == 4


def test_a_large_gang_takes_whole_nodes_and_a_rest() -> None:
    """The rest beside another gang."""
    room = Room(CLUSTER)
    assert room.take(gang(3)) == ((0, 3),)
    assert room.take(gang(10)) is None
    assert room.take(gang(5)) == ((1, 4), (0, 1))
    assert room.free("gpu") == 4


def test_a_gang_that_does_not_fit_takes_nothing() -> None:
    """Five devices are free, but no node has three; and nobody has another kind."""
    room = Room(Cluster(nodes=(Nodes(kind="gpu", count=2, devices=4),)))
    room.take(gang(2))
    assert room.take(gang(3)) == ((1, 3),)
    assert room.take(gang(3)) is None and room.take(gang(1, "cpu")) is None
    assert room.free("gpu") == 3


def test_what_is_given_back_is_free() -> None:
    """In any order."""
    rng = random.Random(0)
    room, taken = Room(CLUSTER), []
    for _ in range(200):
        wanted = gang(rng.randint(1, 8))
        nodes = room.take(wanted)
        if nodes is not None:
            assert sum(devices for _, devices in nodes) == wanted.devices
            taken.append(nodes)
        if taken and rng.random() < 0.5:
            room.give("gpu", taken.pop(rng.randrange(len(taken))))
        assert room.free("gpu") == 12 - sum(devices for nodes in taken for _, devices in nodes)
