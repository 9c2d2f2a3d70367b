"""Plans against the best schedule, their bound, and the other policies."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from apollo_compile.cluster.generate import generate_jobs
from apollo_compile.cluster.plan import bound_of, plan_jobs
from apollo_compile.cluster.policies import policy_by_name
from apollo_compile.cluster.simulate import simulate
from apollo_compile.cluster.values import Cluster, Gang, Job, Nodes
from apollo_compile.errors import ClusterError
from tests.cluster.oracle import best_value

SMALL = Cluster(nodes=(Nodes(kind="fast", count=2, devices=1), Nodes(kind="slow", count=1, devices=1)))
LARGE = Cluster(nodes=(Nodes(kind="h100", count=4, devices=8), Nodes(kind="a100", count=4, devices=8)), restart_s=30.0)


def few_jobs(seed: int, count: int = 4) -> tuple[Job, ...]:
    """Return jobs on one or two fast devices, or a slow one."""
    rng = random.Random(seed)
    jobs = []
    for index in range(count):
        step = rng.uniform(1, 10)
        gangs = (
            Gang(kind="fast", devices=1, step_s=step),
            Gang(kind="fast", devices=2, step_s=step * rng.uniform(0.5, 0.8)),
            Gang(kind="slow", devices=1, step_s=step * rng.uniform(1, 3)),
        )
        jobs.append(Job(name=f"j{index}", steps=rng.randint(1, 5), gangs=gangs, arrival_s=rng.choice((0.0, 5.0))))
    return tuple(jobs)


@pytest.mark.parametrize("objective", ["mean", "makespan"])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_of_few_jobs_is_near_the_best_schedule(seed: int, objective: Literal["mean", "makespan"]) -> None:
    """At most a fifth above it, and the bound is never above."""
    jobs = few_jobs(seed)
    best = best_value(SMALL, jobs, objective)
    plan = plan_jobs(SMALL, jobs, objective)
    assert plan.bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= plan.value_s <= 1.2 * best


def test_most_plans_of_few_jobs_are_the_best_schedule() -> None:
    """Three jobs, twenty times."""
    found = [
        plan_jobs(SMALL, jobs).value_s <= 1.0001 * best_value(SMALL, jobs, "mean")
        for jobs in (few_jobs(seed, 3) for seed in range(20))
    ]
    assert sum(found) >= 14


@pytest.mark.parametrize("objective", ["mean", "makespan"])
def test_a_plan_runs_every_job_once_on_free_devices(objective: Literal["mean", "makespan"]) -> None:
    """Played back, device by device."""
    jobs = generate_jobs(LARGE, 40, seed=3)
    plan = plan_jobs(LARGE, jobs, objective, tries=5)
    by_name = {job.name: job for job in jobs}
    assert sorted(by_name) == sorted(each.job for each in plan.placements)
    for each in plan.placements:
        job = by_name[each.job]
        assert each.gang in job.gangs and each.start_s >= job.arrival_s
        assert each.end_s - each.start_s == pytest.approx(job.seconds(each.gang))
        assert sum(devices for _, devices in each.nodes) == each.gang.devices
    for now in [each.start_s for each in plan.placements]:
        used: dict[tuple[str, int], int] = {}
        for each in plan.placements:
            if each.start_s <= now < each.end_s:
                for node, devices in each.nodes:
                    used[each.gang.kind, node] = used.get((each.gang.kind, node), 0) + devices
        assert max(used.values()) <= 8


def test_200_jobs_on_64_devices_end_sooner_than_first_come_first_served_and_gavel() -> None:
    """The mean completion time is at least 20 % below the one, and not above the other: simulated, with known steps."""
    jobs = generate_jobs(LARGE, 200, seed=0)
    plan = plan_jobs(LARGE, jobs, tries=10)
    fcfs, gavel, apollo = (
        simulate(LARGE, jobs, policy_by_name(name, LARGE, jobs)).mean_completion_s
        for name in ("fcfs", "gavel", "apollo")
    )
    assert apollo <= 0.8 * fcfs and apollo <= gavel
    assert bound_of(LARGE, jobs, "mean") <= plan.mean_completion_s <= apollo


def test_the_same_arguments_give_the_same_plan() -> None:
    """The search counts tries, not time."""
    jobs = generate_jobs(LARGE, 30, seed=1)
    assert plan_jobs(LARGE, jobs, tries=5) == plan_jobs(LARGE, jobs, tries=5)


def test_a_plan_of_the_makespan_has_a_shorter_one() -> None:
    """And the other objective the shorter mean."""
    jobs = generate_jobs(LARGE, 60, seed=2, load=3.0)
    mean, makespan = plan_jobs(LARGE, jobs, "mean", tries=10), plan_jobs(LARGE, jobs, "makespan", tries=10)
    assert makespan.makespan_s <= mean.makespan_s and mean.mean_completion_s <= makespan.mean_completion_s
    assert makespan.gap >= 0 and mean.gap >= 0


def test_a_job_that_fits_nowhere_is_an_error() -> None:
    """With what it needs and what there is."""
    job = Job(name="huge", steps=1, gangs=(Gang(kind="fast", devices=3, step_s=1.0),))
    with pytest.raises(
        ClusterError,
        match="job huge does not fit the cluster: its gangs are 3 of fast; the cluster has 2 x 1 of fast, 1 x 1 of",
    ):
        plan_jobs(SMALL, [job])
