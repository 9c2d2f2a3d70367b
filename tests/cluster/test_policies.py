"""Policies on clusters where what they should do is obvious."""

from __future__ import annotations

import pytest

from apollo_compile.cluster.generate import generate_jobs
from apollo_compile.cluster.policies import policy_by_name, prices
from apollo_compile.cluster.simulate import simulate
from apollo_compile.cluster.values import Cluster, Gang, Job, JobSchedule, Nodes

TWO = Cluster(nodes=(Nodes(kind="cpu", count=2, devices=1),))
KINDS = Cluster(nodes=(Nodes(kind="fast", count=1, devices=1), Nodes(kind="slow", count=1, devices=1)))


def gang(devices: int, step_s: float, kind: str = "cpu") -> Gang:
    """Return a gang of CPUs."""
    return Gang(kind=kind, devices=devices, step_s=step_s)


def job(name: str, steps: int, *gangs: Gang, arrival_s: float = 0.0, devices: int = 0) -> Job:
    """Return a job."""
    return Job(name=name, steps=steps, gangs=gangs, arrival_s=arrival_s, devices=devices)


def run(name: str, cluster: Cluster, *jobs: Job) -> JobSchedule:
    """Return the schedule of a policy."""
    return simulate(cluster, jobs, policy_by_name(name, cluster, jobs))


ONE, BOTH, FAST, SLOW = gang(1, 1.0), gang(2, 1.0), gang(1, 1.0, "fast"), gang(1, 10.0, "slow")


@pytest.mark.parametrize(
    ("name", "cluster", "jobs", "end_s"),
    [
        # a job that needs both devices waits for one, and the next job waits behind it, or passes
        ("fcfs", TWO, [job("a", 10, ONE), job("b", 5, BOTH), job("c", 1, ONE, arrival_s=1.0)], (10.0, 15.0, 16.0)),
        (
            "apollo",
            TWO,
            [job("a", 10, ONE), job("b", 5, BOTH, arrival_s=0.5), job("c", 1, ONE, arrival_s=1.0)],
            (10, 15, 2),
        ),
        # two devices are 1.5 times as fast as one, which pays for a job that nobody waits for
        ("apollo", TWO, [job("a", 9, ONE, gang(2, 1 / 1.5))], (6.0,)),
        # ten steps of 10 s on the slow one, or a wait of 3 s and ten of 1 s
        ("apollo", KINDS, [job("a", 3, FAST), job("b", 10, FAST, SLOW)], (3.0, 13.0)),
    ],
)
def test_jobs_end_when_they_should(name: str, cluster: Cluster, jobs: list[Job], end_s: tuple[float, ...]) -> None:
    """First come, first served lets nobody pass; apollo lets short jobs pass, widens lone ones, and may wait."""
    assert run(name, cluster, *jobs).end_s == pytest.approx(end_s)


def test_apollo_narrows_jobs_that_are_many() -> None:
    """Two devices are not twice as fast as one."""
    found = run("apollo", TWO, *(job(name, 9, ONE, gang(2, 1 / 1.5)) for name in "abcd"))
    assert [each.gang.devices for each in found.placements[:2]] == [1, 1]


def test_gavel_shares_one_device_in_rounds() -> None:
    """Two equal jobs end at about the same time, after the time of both."""
    one = Cluster(nodes=(Nodes(kind="cpu", count=1, devices=1),))
    found = run("gavel", one, *(job(name, 3600, gang(1, 1.0)) for name in "ab"))
    assert max(found.end_s) == 7200 and min(found.end_s) >= 7200 - 360
    assert len(found.placements) > 10


def test_gavel_gives_the_fast_kind_to_the_job_that_gains_most() -> None:
    """Ten times, against twice."""
    little = gang(1, 1.0, "fast"), gang(1, 2.0, "slow")
    much = gang(1, 1.0, "fast"), gang(1, 10.0, "slow")
    found = run("gavel", KINDS, job("a", 100, *little), job("b", 100, *much))
    assert {each.job: each.gang.kind for each in found.placements} == {"a": "slow", "b": "fast"}


@pytest.mark.parametrize("name", ["fcfs", "gavel", "apollo"])
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_finishes_all_work(name: str, seed: int) -> None:
    """The steps of a job's placements, without restarts, are all of its steps."""
    cluster = Cluster(nodes=(Nodes(kind="x", count=2, devices=4), Nodes(kind="y", count=1, devices=8)), restart_s=10.0)
    jobs = generate_jobs(cluster, 30, seed=seed)
    found = run(name, cluster, *jobs)
    for each in jobs:
        placements = [placement for placement in found.placements if placement.job == each.name]
        seconds = [max(0.0, p.end_s - p.start_s - (10.0 if index else 0.0)) for index, p in enumerate(placements)]
        steps = sum(s / p.gang.step_s for s, p in zip(seconds, placements, strict=True))
        assert steps == pytest.approx(each.steps, rel=1e-6)
        if name != "apollo":
            assert {placement.gang.devices for placement in placements} == {each.devices}


def test_the_price_of_a_kind_is_its_relative_speed() -> None:
    """One job is twice as fast on the fast kind, the other four times."""
    jobs = [
        job("a", 1, gang(1, 1.0, "fast"), gang(1, 2.0, "slow")),
        job("b", 1, gang(1, 1.0, "fast"), gang(1, 4.0, "slow")),
    ]
    assert prices(KINDS, jobs)[0] == {"fast": 1.0, "slow": pytest.approx(0.375)}
