"""Simulate jobs on a cluster under a policy.

    simulate(cluster, jobs, policy) -> JobSchedule

Jobs arrive, run at the rate of their gang, and end. At each arrival and end, and at multiples of `policy.round_s`, the
policy says which jobs stop and which start. A job that goes on after a stop loses `cluster.restart_s` first. Nothing is
measured here: rates are those of the jobs' gangs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from apollo_compile.cluster.values import Cluster, Gang, Job, JobPlacement, JobSchedule
from apollo_compile.errors import ClusterError

NodeShares = tuple[tuple[int, int], ...]
"""Index of a node among those of its kind, and devices on it."""


class Room:
    """Free devices by node; `take` and `give` change it.

    A gang of at most one node's devices takes the fullest node that has them free. A larger one takes whole free nodes,
    and its rest from the fullest node that has it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._size = {nodes.kind: nodes.devices for nodes in cluster.nodes}
        self._free = {nodes.kind: [nodes.devices] * nodes.count for nodes in cluster.nodes}

    def free(self, kind: str) -> int:
        """Return the number of free devices of a kind."""
        return sum(self._free[kind])

    def find(self, gang: Gang) -> NodeShares | None:
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

    def take(self, gang: Gang) -> NodeShares | None:
        """Take the devices of a gang and return their nodes; None, and nothing is taken, if it does not fit now."""
        found = self.find(gang)
        for node, devices in found or ():
            self._free[gang.kind][node] -= devices
        return found

    def give(self, kind: str, nodes: Iterable[tuple[int, int]]) -> None:
        """Return devices."""
        for node, devices in nodes:
            self._free[kind][node] += devices


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that a policy asks for; stops come first."""

    start: tuple[tuple[int, Gang], ...] = ()
    """Indices of waiting jobs with their gangs."""
    stop: tuple[int, ...] = ()
    """Indices of running jobs."""


@dataclass(slots=True)
class Running:
    """A job on its devices."""

    gang: Gang
    nodes: NodeShares
    start_s: float
    work_from_s: float
    """When it computes its first step: after the restart."""
    end_s: float
    """When it ends if it is not stopped."""


@dataclass(slots=True)
class ClusterState:
    """State of the cluster and of the jobs that a policy may look at."""

    cluster: Cluster
    jobs: Sequence[Job]
    now_s: float
    left: list[float]
    """Steps of every job that are left; of running jobs, when they started."""
    waiting: list[int]
    """Jobs that have arrived and do not run, by arrival."""
    running: dict[int, Running]
    room: Room
    """Free devices; a policy may use a copy only."""
    service: list[float]
    """Device-seconds that each job got in earlier intervals."""


class Policy(Protocol):
    """Decides which jobs run."""

    name: str
    round_s: float
    """Time between decisions besides those at arrivals and ends, which are at its multiples; infinite for none."""

    def decide(self, state: ClusterState) -> Changes:
        """Return what to change now."""
        ...


def simulate(cluster: Cluster, jobs: Sequence[Job], policy: Policy) -> JobSchedule:
    """Return what `policy` makes of the jobs.

    Raises:
        ClusterError: a job has no gang that fits the cluster, or the policy never starts a job.
    """
    check_jobs(cluster, jobs)
    order = sorted(range(len(jobs)), key=lambda job: (jobs[job].arrival_s, job))
    state = ClusterState(
        cluster, jobs, 0.0, [float(job.steps) for job in jobs], [], {}, Room(cluster), [0.0] * len(jobs)
    )
    placements: list[JobPlacement] = []
    ends = [math.inf] * len(jobs)
    arrived = 0
    while arrived < len(order) or state.waiting or state.running:
        upcoming = [running.end_s for running in state.running.values()]
        if arrived < len(order):
            upcoming.append(jobs[order[arrived]].arrival_s)
        if state.waiting and state.running and policy.round_s < math.inf:
            upcoming.append((math.floor(state.now_s / policy.round_s) + 1) * policy.round_s)
        if not upcoming:
            names = ", ".join(jobs[job].name for job in state.waiting[:3])
            raise ClusterError(f"policy {policy.name} never starts {names}, although all devices are free")
        state.now_s = max(state.now_s, min(upcoming))
        for job in [job for job, running in state.running.items() if running.end_s <= state.now_s]:
            ends[job] = state.now_s
            placements.append(_stop(state, job))
        while arrived < len(order) and jobs[order[arrived]].arrival_s <= state.now_s:
            state.waiting.append(order[arrived])
            arrived += 1
        decision = policy.decide(state)
        for job in decision.stop:
            placements.append(_stop(state, job))
            state.waiting.append(job)
        for job, gang in decision.start:
            _start(state, job, gang, policy)
    placements = [each for each in placements if each.end_s > each.start_s]
    return JobSchedule(
        policy=policy.name,
        placements=tuple(sorted(placements, key=lambda each: (each.start_s, each.job))),
        completion_s=tuple(end - job.arrival_s for end, job in zip(ends, jobs, strict=True)),
        end_s=tuple(ends),
        samples=sum(job.steps * job.samples for job in jobs),
        device_s=cluster.num_devices * max(ends, default=0.0),
    )


def check_jobs(cluster: Cluster, jobs: Sequence[Job]) -> None:
    """Raise `ClusterError` for a job that cannot run on this cluster."""
    for job in jobs:
        if not any(cluster.fits(gang) for gang in job.gangs):
            wanted = ", ".join(f"{gang.devices} of {gang.kind}" for gang in job.gangs) or "none"
            has = ", ".join(f"{nodes.count} x {nodes.devices} of {nodes.kind}" for nodes in cluster.nodes)
            raise ClusterError(
                f"job {job.name} does not fit the cluster: its gangs are {wanted}; the cluster has {has}"
            )


def _start(state: ClusterState, job: int, gang: Gang, policy: Policy) -> None:
    nodes = state.room.take(gang)
    if nodes is None:
        raise ClusterError(f"policy {policy.name} starts {state.jobs[job].name} on devices that are not free")
    state.waiting.remove(job)
    is_resumed = state.left[job] < state.jobs[job].steps
    work_from_s = state.now_s + (state.cluster.restart_s if is_resumed else 0.0)
    end_s = work_from_s + state.left[job] * gang.step_s
    state.running[job] = Running(gang, nodes, state.now_s, work_from_s, end_s)


def _stop(state: ClusterState, job: int) -> JobPlacement:
    running = state.running.pop(job)
    state.room.give(running.gang.kind, running.nodes)
    done = max(0.0, state.now_s - running.work_from_s) / running.gang.step_s
    state.left[job] = max(0.0, state.left[job] - done)
    state.service[job] += (state.now_s - running.start_s) * running.gang.devices
    return JobPlacement(
        job=state.jobs[job].name, gang=running.gang, nodes=running.nodes, start_s=running.start_s, end_s=state.now_s
    )
