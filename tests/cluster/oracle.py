"""The best schedule of a few jobs: all orders and gangs are tried, each job as early as the earlier ones permit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from apollo_compile.cluster.values import Cluster, Gang, Job


def best_value(cluster: Cluster, jobs: Sequence[Job], objective: str) -> float:
    """Return the smallest mean completion time or makespan of any uninterrupted schedule; all nodes have one device."""
    assert all(nodes.devices == 1 for nodes in cluster.nodes)
    best = math.inf
    for order in itertools.permutations(range(len(jobs))):
        for gangs in itertools.product(*(job.gangs for job in jobs)):
            if all(cluster.fits(gang) for gang in gangs):
                best = min(best, value(cluster, jobs, order, gangs, objective))
    return best


def value(cluster: Cluster, jobs: Sequence[Job], order: Sequence[int], gangs: Sequence[Gang], objective: str) -> float:
    """Return the value of the schedule that places the jobs in this order, each at the earliest possible time."""
    spans: list[tuple[float, float, Gang]] = []
    ends = [0.0] * len(jobs)
    for job in order:
        gang, duration = gangs[job], jobs[job].seconds(gangs[job])
        start = next(
            at for at in starts(spans, jobs[job].arrival_s) if has_room(cluster, spans, gang, at, at + duration)
        )
        spans.append((start, start + duration, gang))
        ends[job] = start + duration
    if objective == "makespan":
        return max(ends)
    return sum(end - job.arrival_s for end, job in zip(ends, jobs, strict=True)) / len(jobs)


def starts(spans: Sequence[tuple[float, float, Gang]], arrival: float) -> Iterator[float]:
    """Yield the times at which a job may start first."""
    yield from sorted({arrival, *(end for _, end, _ in spans if end > arrival)})


def has_room(
    cluster: Cluster, spans: Sequence[tuple[float, float, Gang]], gang: Gang, start: float, end: float
) -> bool:
    """Return whether the devices are free at every time of an interval."""
    nodes = cluster.of_kind(gang.kind)
    times = [start, *(begin for begin, _, _ in spans if start < begin < end)]
    return all(
        sum(g.devices for begin, stop, g in spans if g.kind == gang.kind and begin <= at < stop) + gang.devices
        <= nodes.count
        for at in times
    )
