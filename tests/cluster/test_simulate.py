"""The simulator: rates, restarts and rounds on schedules that are obvious, and policies that break its rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from apollo_compile.cluster.simulate import Changes, ClusterState, simulate
from apollo_compile.cluster.values import Cluster, Gang, Job, Nodes
from apollo_compile.errors import ClusterError

ONE = Cluster(nodes=(Nodes(kind="cpu", count=1, devices=1),), restart_s=2.0)
GANG = Gang(kind="cpu", devices=1, step_s=1.0)
LONG = Job(name="long", steps=10, gangs=(GANG,))
SHORT = Job(name="short", steps=2, gangs=(GANG,), arrival_s=4.0, samples=3.0)


class Told:
    """A policy that does what a function says."""

    name = "told"

    def __init__(self, decide: Callable[[ClusterState], Changes], round_s: float = math.inf) -> None:
        self.decide = decide
        self.round_s = round_s


def first(state: ClusterState) -> Changes:
    """Run one job after the other."""
    return Changes(((state.waiting[0], GANG),)) if state.waiting and not state.running else Changes()


def shortest(state: ClusterState) -> Changes:
    """Run the job with the fewest steps, and interrupt another for it."""
    active = sorted((*state.waiting, *state.running), key=lambda job: state.jobs[job].steps)
    if not active or active[0] in state.running:
        return Changes()
    return Changes(((active[0], GANG),), tuple(state.running))


def test_jobs_run_one_after_the_other() -> None:
    """Ten seconds and two, the second waits for six."""
    found = simulate(ONE, [LONG, SHORT], Told(first))
    assert found.end_s == (10.0, 12.0) and found.completion_s == (10.0, 8.0)
    assert (found.makespan_s, found.mean_completion_s) == (12.0, 9.0)
    assert found.samples_per_s == pytest.approx((10 + 2 * 3.0) / 12)
    assert found.busy_share == 1.0


def test_an_interrupted_job_keeps_its_steps_and_loses_a_restart() -> None:
    """It runs to 4, and from 6 to 14: two seconds to restart and six steps."""
    found = simulate(ONE, [LONG, SHORT], Told(shortest))
    assert [(each.job, each.start_s, each.end_s) for each in found.placements] == [
        ("long", 0.0, 4.0),
        ("short", 4.0, 6.0),
        ("long", 6.0, 14.0),
    ]


def test_a_policy_with_rounds_is_asked_at_their_multiples() -> None:
    """While a job runs and another waits."""
    asked = []

    def decide(state: ClusterState) -> Changes:
        asked.append(state.now_s)
        return first(state)

    simulate(ONE, [LONG, SHORT], Told(decide, round_s=3.0))
    assert asked == [0.0, 4.0, 6.0, 9.0, 10.0, 12.0]


def test_a_policy_that_never_starts_a_job_is_an_error() -> None:
    """Not an endless loop."""
    with pytest.raises(ClusterError, match="policy told never starts long, although all devices are free"):
        simulate(ONE, [LONG], Told(lambda state: Changes()))


def test_a_policy_cannot_use_a_device_twice() -> None:
    """The simulator counts them itself."""
    both = Told(lambda state: Changes(tuple((job, GANG) for job in state.waiting)))
    with pytest.raises(ClusterError, match="policy told starts short on devices that are not free"):
        simulate(ONE, [LONG, SHORT], both)


def test_no_jobs_are_an_empty_schedule() -> None:
    """With no division by their number."""
    found = simulate(ONE, [], Told(first))
    assert (found.makespan_s, found.mean_completion_s, found.samples_per_s, found.busy_share) == (0.0, 0.0, 0.0, 0.0)
