"""Plan jobs on a cluster: a gang, nodes and a start for each, without interruption.

    plan_jobs(cluster, jobs, objective) -> ClusterPlan

The policy `apollo` makes a schedule with all arrivals known. Others follow with other weights of the jobs that wait,
and then with random changes to the order of jobs and the weight, each from the best so far; the best stays. The number
of tries is fixed, so that equal arguments give equal plans on every machine.

For the bound, all devices are one machine with the speed of all of them. A job takes the least work of its gangs there,
and shortest remaining work first is optimal; and no job is shorter than on its fastest gang.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import Literal

from apollo_compile.cluster.policies import Apollo, prices
from apollo_compile.cluster.simulate import check_jobs, simulate
from apollo_compile.cluster.values import Cluster, ClusterPlan, Job, JobSchedule

Objective = Literal["mean", "makespan"]

TRIES = 100
"""Random changes to the order."""

_WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SPREAD = 0.3
"""Standard deviation of the logarithm of a change."""


def plan_jobs(
    cluster: Cluster, jobs: Sequence[Job], objective: Objective = "mean", *, tries: int = TRIES, seed: int = 0
) -> ClusterPlan:
    """Return the best plan that was found.

    Arguments:
        cluster: the cluster.
        jobs: the jobs, with their arrivals.
        objective: mean completion time, or makespan. Throughput, all samples over the makespan, is largest where the
            makespan is smallest.
        tries: number of random changes.
        seed: of the changes.

    Raises:
        ClusterError: a job has no gang that fits the cluster.
    """
    check_jobs(cluster, jobs)
    rng = random.Random(seed)

    def attempt(weight: float, longest_first: bool, bias: Sequence[float]) -> tuple[float, JobSchedule]:
        policy = Apollo(cluster, jobs, weight=weight, longest_first=longest_first, bias=bias)
        schedule = simulate(cluster, jobs, policy)
        return schedule.makespan_s if objective == "makespan" else schedule.mean_completion_s, schedule

    bias = [1.0] * len(jobs)
    orders = (False, True) if objective == "makespan" else (False,)
    starts = [(weight, longest) for weight in _WEIGHTS for longest in orders]
    found = [(*attempt(weight, longest, bias), weight, longest) for weight, longest in starts]
    value, best, weight, longest = min(found, key=lambda each: each[0])
    for _ in range(tries):
        changed = list(bias)
        for job in rng.sample(range(len(jobs)), k=min(len(jobs), rng.choice((1, 2, 4, 8)))):
            changed[job] *= math.exp(rng.gauss(0, _SPREAD))
        other = weight * math.exp(rng.gauss(0, _SPREAD))
        new_value, schedule = attempt(other, longest, changed)
        if new_value <= value:
            value, best, weight, bias = new_value, schedule, other, changed
    return ClusterPlan(
        objective=objective,
        cluster=cluster,
        jobs=tuple(jobs),
        placements=best.placements,
        value_s=value,
        bound_s=bound_of(cluster, jobs, objective),
        makespan_s=best.makespan_s,
        mean_completion_s=best.mean_completion_s,
        samples_per_s=best.samples_per_s,
    )


def bound_of(cluster: Cluster, jobs: Sequence[Job], objective: Objective) -> float:
    """Return a time that no schedule is below, interrupted or not."""
    if not jobs:
        return 0.0
    price, capacity = prices(cluster, jobs)
    fitting = [[gang for gang in job.gangs if cluster.fits(gang)] for job in jobs]
    shortest = [min(map(job.seconds, gangs)) for job, gangs in zip(jobs, fitting, strict=True)]
    work = [
        min(job.seconds(gang) * gang.devices * price[gang.kind] / capacity for gang in gangs)
        for job, gangs in zip(jobs, fitting, strict=True)
    ]
    ends = _on_one_machine(jobs, work)
    if objective == "makespan":
        alone = max(job.arrival_s + least for job, least in zip(jobs, shortest, strict=True))
        return max(alone, max(ends))
    arrivals = sum(job.arrival_s for job in jobs)
    return max(sum(shortest), sum(ends) - arrivals) / len(jobs)


def _on_one_machine(jobs: Sequence[Job], work: Sequence[float]) -> list[float]:
    """Return the ends of the jobs where the one with the least work left runs, and an arrival may interrupt it."""
    order = sorted(range(len(jobs)), key=lambda job: jobs[job].arrival_s)
    left: list[float] = []
    ends: list[float] = []
    now_s = 0.0
    for place, job in enumerate(order):
        now_s = max(now_s, jobs[job].arrival_s)
        heapq.heappush(left, work[job])
        until = jobs[order[place + 1]].arrival_s if place + 1 < len(order) else math.inf
        while left and now_s < until:
            least = heapq.heappop(left)
            if now_s + least > until:
                heapq.heappush(left, least - (until - now_s))
                now_s = until
            else:
                now_s += least
                ends.append(now_s)
    return ends
