"""Generated jobs."""

from __future__ import annotations

import pytest

from apollo_compile.cluster.generate import generate_jobs
from apollo_compile.cluster.values import Cluster, Nodes

CLUSTER = Cluster(nodes=(Nodes(kind="fast", count=2, devices=8), Nodes(kind="slow", count=1, devices=4)))


def test_the_same_seed_gives_the_same_jobs() -> None:
    """And another one others."""
    assert (
        generate_jobs(CLUSTER, 20, seed=1) == generate_jobs(CLUSTER, 20, seed=1) != generate_jobs(CLUSTER, 20, seed=2)
    )


@pytest.mark.parametrize("seed", range(3))
def test_jobs_scale_and_gain_from_the_faster_kind(seed: int) -> None:
    """More devices are faster, less than in proportion; gangs fit the cluster, and the one asked for is among them."""
    for job in generate_jobs(CLUSTER, 50, seed=seed):
        by_kind = {k: {g.devices: g.step_s for g in job.gangs if g.kind == k} for k in ("fast", "slow")}
        assert sorted(by_kind["fast"]) == [1, 2, 4, 8, 16] and sorted(by_kind["slow"]) == [1, 2, 4]
        for devices in (1, 2):
            assert 0.5 < by_kind["fast"][2 * devices] / by_kind["fast"][devices] < 1
            assert by_kind["fast"][devices] < by_kind["slow"][devices]
        assert job.asked() and job.steps >= 1


def test_twice_the_load_arrives_in_half_the_time() -> None:
    """The same jobs."""
    once, twice = (generate_jobs(CLUSTER, 50, load=load) for load in (1.0, 2.0))
    assert twice[-1].arrival_s == pytest.approx(once[-1].arrival_s / 2, rel=0.01)
