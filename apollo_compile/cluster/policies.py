"""Policies that share a cluster.

fcfs      first come, first served: what was asked for, no job before an earlier one
gavel     rounds: the jobs with the least service so far, on the kinds that they gain most from (Gavel, OSDI 2020)
apollo    uninterrupted gangs of any size: the job and gang with the least cost to all jobs that wait
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apollo_compile.cluster.simulate import Changes, ClusterState, Policy, Room
from apollo_compile.cluster.values import Cluster, Gang, Job
from apollo_compile.errors import ClusterError


class Fcfs:
    """First come, first served, each on the fastest free devices of the number that it asked for."""

    name, round_s = "fcfs", math.inf

    def decide(self, state: ClusterState) -> Changes:
        """Start jobs in the order of their arrival, up to the first that has to wait."""
        room = copy.deepcopy(state.room)
        starts: list[tuple[int, Gang]] = []
        for job in state.waiting:
            gang = next((gang for gang in asked(state.jobs[job], state.cluster) if room.take(gang)), None)
            if gang is None:
                break
            starts.append((job, gang))
        return Changes(tuple(starts))


class Gavel:
    """Max-min fairness over kinds of devices, in rounds.

    Gavel computes by a linear program which share of its time every job should have on every kind, and in each round
    runs the jobs that are furthest behind. Here the jobs with the least service so far are chosen, as many as fit, and
    among these the ones that gain most from the faster kind choose first.
    """

    name, round_s = "gavel", 360.0

    def decide(self, state: ClusterState) -> Changes:
        """Choose again at the begin of a round, and between rounds only start jobs on free devices."""
        is_round = state.now_s % self.round_s == 0
        kept = {} if is_round else state.running
        service = {job: state.service[job] for job in (*state.waiting, *state.running) if job not in kept}
        for job in service.keys() & state.running.keys():
            running = state.running[job]
            service[job] += (state.now_s - running.start_s) * running.gang.devices
        free = {nodes.kind: nodes.count * nodes.devices for nodes in state.cluster.nodes}
        for running in kept.values():
            free[running.gang.kind] -= running.gang.devices
        wanted = self._choose(state, sorted(service, key=lambda job: (service[job], job)), free)
        stop = tuple(job for job, each in state.running.items() if job not in kept and wanted.get(job) != each.gang)
        room = copy.deepcopy(state.room)
        for job in stop:
            room.give(state.running[job].gang.kind, state.running[job].nodes)
        starts = [(job, gang) for job, gang in wanted.items() if job not in state.running or job in stop]
        # Jobs that go on keep their nodes, so that a gang may not fit although devices are free; it waits.
        return Changes(tuple((job, gang) for job, gang in starts if room.take(gang)), stop)

    def _choose(self, state: ClusterState, order: Sequence[int], free: dict[str, int]) -> dict[int, Gang]:
        num_free = sum(free.values())
        chosen: list[tuple[float, int, tuple[Gang, ...]]] = []
        for job in order:
            gangs = asked(state.jobs[job], state.cluster)
            if gangs[0].devices <= num_free:
                num_free -= gangs[0].devices
                gain = gangs[-1].step_s / gangs[0].step_s if len(gangs) > 1 else math.inf
                chosen.append((gain, job, gangs))
        wanted: dict[int, Gang] = {}
        for _, job, gangs in sorted(chosen, key=lambda each: (-each[0], each[1])):
            gang = next((gang for gang in gangs if free[gang.kind] >= gang.devices), None)
            if gang is not None:
                free[gang.kind] -= gang.devices
                wanted[job] = gang
        return wanted


def asked(job: Job, cluster: Cluster) -> tuple[Gang, ...]:
    """Return the gangs that a job asked for and that fit the cluster, the fastest first; if there are none, any."""
    fitting = tuple(gang for gang in job.asked() if cluster.fits(gang))
    return fitting or (min((g for g in job.gangs if cluster.fits(g)), key=lambda gang: (gang.devices, gang.step_s)),)


class Apollo:
    """Gangs of any size and kind, without interruption.

    A job on a gang costs its own wait and duration, and makes each of the n other waiting jobs wait for its share of
    the cluster:

        cost = wait + duration * (1 + n * devices * price / (sum of devices * price of the cluster))

    The price of a kind is the mean speed of the jobs there, relative to the fastest kind of the same job. The wait is 0
    for free devices, else the time until enough running jobs have ended. Every job chooses the gang of the least cost;
    of the jobs whose gang is free, the one with the least cost starts, and the others choose again.

    Arguments:
        cluster: the cluster.
        jobs: all jobs that `decide` will see.
        weight: factor of the n other jobs.
        longest_first: order of the jobs, for the makespan: those with the most work first.
        bias: factor of the cost of every job in the order; a search varies it.
    """

    name, round_s = "apollo", math.inf

    def __init__(
        self,
        cluster: Cluster,
        jobs: Sequence[Job],
        *,
        weight: float = 1.0,
        longest_first: bool = False,
        bias: Sequence[float] | None = None,
    ) -> None:
        price, capacity = prices(cluster, jobs)
        self._gangs = [tuple(gang for gang in job.gangs if cluster.fits(gang)) for job in jobs]
        self._classes = sorted({(gang.kind, gang.devices) for gangs in self._gangs for gang in gangs})
        index = {each: place for place, each in enumerate(self._classes)}
        shape = (len(jobs), max(map(len, self._gangs), default=0))
        self._step_s = np.full(shape, np.inf)
        self._share = np.ones(shape)
        self._class = np.zeros(shape, dtype=int)
        for job, gangs in enumerate(self._gangs):
            for place, gang in enumerate(gangs):
                self._step_s[job, place] = gang.step_s
                self._share[job, place] = gang.devices * price[gang.kind] / capacity
                self._class[job, place] = index[gang.kind, gang.devices]
        self._weight = weight
        self._longest_first = longest_first
        self._bias = np.ones(len(jobs)) if bias is None else np.asarray(bias)

    def decide(self, state: ClusterState) -> Changes:
        """Start the jobs whose best gang is free."""
        room = copy.deepcopy(state.room)
        ends = [(running.end_s, running.gang) for running in state.running.values()]
        starts: list[tuple[int, Gang]] = []
        waiting = np.array(state.waiting, dtype=int)
        seconds = self._step_s[waiting] * np.array([state.left[job] for job in state.waiting])[:, None]
        while len(waiting):
            waits = self._waits(state, room, ends)
            duration = seconds * (1 + self._weight * (len(waiting) - 1) * self._share[waiting])
            cost = waits[self._class[waiting]] + duration
            best = cost.argmin(axis=1)
            rows = np.arange(len(waiting))
            is_free = waits[self._class[waiting, best]] == 0
            if not is_free.any():
                break
            work = (seconds * self._share[waiting]).min(axis=1)
            key = (-work if self._longest_first else cost[rows, best]) * self._bias[waiting]
            row = int(np.where(is_free, key, np.inf).argmin())
            job, gang = int(waiting[row]), self._gangs[waiting[row]][best[row]]
            room.take(gang)
            starts.append((job, gang))
            ends.append((state.now_s + seconds[row, best[row]], gang))
            waiting, seconds = np.delete(waiting, row), np.delete(seconds, row, axis=0)
        return Changes(tuple(starts))

    def _waits(self, state: ClusterState, room: Room, ends: Sequence[tuple[float, Gang]]) -> NDArray[np.float64]:
        """Return, by class of gangs, the time until as many devices are free: 0 where the gang fits now."""
        found = np.zeros(len(self._classes))
        for place, (kind, devices) in enumerate(self._classes):
            if room.find(Gang(kind=kind, devices=devices, step_s=0.0)) is None:
                missing = devices - room.free(kind)
                found[place] = math.inf
                for end_s, gang in sorted((end for end in ends if end[1].kind == kind), key=lambda end: end[0]):
                    missing -= gang.devices
                    if missing <= 0:  # if only the nodes are wrong, one end may help
                        found[place] = max(end_s - state.now_s, 1e-9)
                        break
        return found


def prices(cluster: Cluster, jobs: Sequence[Job]) -> tuple[dict[str, float], float]:
    """Return, by kind, the mean speed of a device there relative to the fastest kind of the same job; and their sum."""
    kinds = [nodes.kind for nodes in cluster.nodes]
    sums = dict.fromkeys(kinds, 0.0)
    for job in jobs:
        fitting = [gang for gang in job.gangs if cluster.fits(gang)]
        fastest = {
            kind: max((1 / (gang.devices * gang.step_s) for gang in fitting if gang.kind == kind), default=0.0)
            for kind in kinds
        }
        top = max(fastest.values())
        for kind in kinds:
            sums[kind] += fastest[kind] / top / len(jobs)
    price = {kind: max(value, 1e-3) for kind, value in sums.items()}
    return price, sum(nodes.count * nodes.devices * price[nodes.kind] for nodes in cluster.nodes)


def policy_by_name(name: str, cluster: Cluster, jobs: Sequence[Job]) -> Policy:
    """Return the policy of a name.

    Raises:
        ClusterError: there is none.
    """
    known: dict[str, Policy] = {each.name: each for each in (Fcfs(), Gavel(), Apollo(cluster, jobs))}
    if name not in known:
        raise ClusterError(f"unknown policy {name!r}; known: {', '.join(known)}")
    return known[name]
