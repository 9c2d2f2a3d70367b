"""Jobs for simulations: models of several sizes that scale and gain from a faster kind differently.

    generate_jobs(cluster, count, seed=...) -> [Job]

Everything is drawn from distributions, nothing from a measured cluster. Arrivals are a Poisson process, durations are
log-normal with a long tail, as traces of clusters show them, and most jobs ask for few devices.
"""

from __future__ import annotations

import random
from dataclasses import replace

from apollo_compile.cluster.values import Cluster, Gang, Job

SIZES = (1, 2, 4, 8, 16)


def generate_jobs(cluster: Cluster, count: int, *, seed: int = 0, load: float = 1.0) -> tuple[Job, ...]:
    """Return `count` jobs, which together ask for `load` times what the cluster has while they arrive."""
    rng = random.Random(seed)
    jobs = [_job(cluster, index, rng) for index in range(count)]
    asked_s = sum(job.asked()[-1].devices * job.seconds(job.asked()[-1]) for job in jobs)
    gap_s = asked_s / cluster.num_devices / load / max(count, 1)
    now_s = 0.0
    arrived = []
    for job in jobs:
        arrived.append(replace(job, arrival_s=round(now_s, 1)))
        now_s += rng.expovariate(1 / gap_s)
    return tuple(arrived)


def _job(cluster: Cluster, index: int, rng: random.Random) -> Job:
    scaling = rng.uniform(0.6, 0.97)
    step_s = rng.lognormvariate(-0.5, 0.8)
    gangs: list[Gang] = []
    for place, nodes in enumerate(cluster.nodes):
        slower = 1.0 if place == 0 else rng.uniform(1.2, 4.0)
        for devices in (size for size in SIZES if size <= nodes.count * nodes.devices):
            seconds = step_s * slower / devices**scaling
            gangs.append(Gang(kind=nodes.kind, devices=devices, step_s=round(seconds, 6)))
    duration_s = rng.lognormvariate(7.5, 1.3)
    largest = max(gang.devices for gang in gangs)
    devices = min(rng.choices(SIZES, weights=(50, 20, 15, 10, 5))[0], largest)
    asked = next(gang for gang in gangs if gang.devices == devices)
    return Job(
        name=f"job{index}",
        steps=max(1, round(duration_s / asked.step_s)),
        gangs=tuple(gangs),
        devices=devices,
        samples=float(rng.choice((32, 64, 128, 256))),
    )
