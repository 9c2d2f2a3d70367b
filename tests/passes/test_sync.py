from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from apollo_compile.ir import Dependency, Plan, SegmentGraph
from apollo_compile.ir.check import check_syncs
from apollo_compile.passes.sync import eliminate_syncs
from tests.builders import random_planned


def pairs(dependencies: tuple[Dependency, ...]) -> list[tuple[int, int]]:
    """Return (producer, consumer) of every dependency."""
    return [(dependency.producer, dependency.consumer) for dependency in dependencies]


def reachable(made: SegmentGraph, planned: Plan, waits: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the transitive closure of lane order and waits, by repeated joining: the oracle."""
    order = [assignment.segment for assignment in planned.in_start_order()]
    edges: set[tuple[int, int]] = set(waits)
    for lane in planned.lanes:
        own = [segment for segment in order if planned.assignments[segment].lane == lane.id]
        edges |= set(itertools.pairwise(own))
    while True:
        longer = edges | {(a, d) for a, b in edges for c, d in edges if b == c}
        if longer == edges:
            return edges
        edges = longer


@pytest.mark.parametrize("quota", [None, 10**9])
@pytest.mark.parametrize("seed", range(60))
def test_every_dependency_is_reachable_and_not_without_any_wait(seed: int, quota: int | None) -> None:
    """Against the transitive closure, on random plans; with a memory quota, what has ended before must have ended."""
    made, planned = random_planned(seed)
    planned, lanes = replace(planned, memory_quota=quota), planned.lanes
    syncs = eliminate_syncs(made, planned)
    check_syncs(syncs, made, planned)
    waits = pairs(syncs.waits)
    needed = {(producer, segment.id) for segment in made.segments for producer in made.predecessors(segment.id)}
    for one in planned.in_start_order():
        for other in planned.in_start_order():
            if one.start_ns < other.start_ns and set(lanes[one.lane].units) & set(lanes[other.lane].units):
                needed.add((one.segment, other.segment))
            if quota is not None and one.end_ns <= other.start_ns:
                needed.add((one.segment, other.segment))
    assert needed <= reachable(made, planned, waits)
    for wait in waits:
        assert not needed <= reachable(made, planned, [other for other in waits if other != wait])
