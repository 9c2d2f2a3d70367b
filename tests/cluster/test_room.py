"""Free devices by node."""

from __future__ import annotations

import random

import pytest

from apollo_compile.cluster.simulate import Room
from apollo_compile.cluster.values import Cluster, Gang, Nodes

CLUSTER = Cluster(nodes=(Nodes(kind="gpu", count=3, devices=4),))


def gang(devices: int, kind: str = "gpu") -> Gang:
    """Return a gang of any speed."""
    return Gang(kind=kind, devices=devices, step_s=1.0)


@pytest.mark.parametrize(
    ("gangs", "taken", "left"),
    [
        ([3, 2, 1, 2], [((0, 3),), ((1, 2),), ((0, 1),), ((1, 2),)], 4),  # the fullest node that has room
        ([3, 10, 5], [((0, 3),), None, ((1, 4), (0, 1))], 4),  # whole nodes, and a rest beside another gang
        ([6, 3, 3, 1, 2], [((0, 4), (1, 2)), ((2, 3),), None, ((2, 1),), ((1, 2),)], 0),  # no node has three
    ],
)
def test_gangs_take_whole_nodes_or_the_fullest_one(gangs: list[int], taken: list[object], left: int) -> None:
    """What does not fit takes nothing, and nobody has another kind."""
    room = Room(CLUSTER)
    assert [room.take(gang(devices)) for devices in gangs] == taken
    assert room.take(gang(1, "cpu")) is None and room.free("gpu") == left


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
