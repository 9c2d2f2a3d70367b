"""Run the jobs of a plan on Ray: gangs by placement groups, torchrun inside.

    run_plan(plan, logs="logs") -> [Outcome]

Jobs start in the order of the plan, without waiting for their arrivals: a job gets its placement group, all devices at
once or none, before the next one asks for its own. Without an address, Ray runs on this machine and pretends to have
the devices of the plan's cluster. On a real cluster, nodes offer a resource named like the kind, `ray start
--resources='{"h100": 8}'`, and share the folder that the run was started in. A job has one torchrun on each node of its
gang; if one dies, the others are ended, the job is reported, and its devices are free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_compile.cluster.launch import check_plan, torchrun_arguments
from apollo_compile.cluster.values import Cluster, ClusterPlan, Job, JobPlacement
from apollo_compile.errors import ClusterError

_POLL_S = 0.1
_GRACE_S = 30.0
"""Time that the processes of a job have to end themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a job ended."""

    job: str
    start_s: float
    """From the begin of the run, when the gang had its devices."""
    end_s: float
    problem: str = ""
    """Why it failed; empty if it ended well."""


Tell = Callable[[str], None]


def run_plan(
    plan: ClusterPlan, *, logs: Path, address: str | None = None, tell: Tell = lambda line: None
) -> list[JobOutcome]:
    """Run all jobs of a plan and return how they ended, in the order of their ends.

    Arguments:
        plan: the plan.
        logs: folder for the output of every job and node.
        address: of a Ray cluster; None starts one on this machine, which ends with the run.
        tell: called with a line for every start and end.

    Raises:
        ClusterError: Ray is not installed, a job has no command, or the Ray cluster has too few devices for a job.
    """
    check_plan(plan)
    with _ray(plan.cluster, address) as ray:
        return _Run(ray, plan, logs, tell, spread="SPREAD" if address is None else "STRICT_SPREAD").all()


@contextlib.contextmanager
def _ray(cluster: Cluster, address: str | None) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise ClusterError("Ray, which runs plans, is not installed: pip install apollo-compile[cluster]") from error
    simulated: dict[str, Any] = {
        "num_cpus": 1,  # Ray starts a process for each, and gangs use none
        "num_gpus": sum(nodes.count * nodes.devices for nodes in cluster.nodes if nodes.gpu),
        "resources": {nodes.kind: float(nodes.count * nodes.devices) for nodes in cluster.nodes},
        "include_dashboard": False,
    }
    options = simulated if address is None else {"address": address}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(slots=True)
class _Gang:
    """A job that runs."""

    job: Job
    group: Any
    agents: list[Any]
    calls: list[Any]
    start_s: float


class _Run:
    """One run of a plan; `spread` is Ray's strategy for gangs of several nodes."""

    def __init__(self, ray: Any, plan: ClusterPlan, logs: Path, tell: Tell, spread: str) -> None:
        self._ray = ray
        self._plan = plan
        self._jobs = {job.name: job for job in plan.jobs}
        self._logs = logs
        self._tell = tell
        self._spread = spread
        self._begin = time.monotonic()
        self._running: list[_Gang] = []
        self._ended: list[JobOutcome] = []

    def all(self) -> list[JobOutcome]:
        """Run the jobs in the order of the plan."""
        try:
            for placement in self._plan.placements:
                self._start(placement)
            while self._running:
                self._poll()
        finally:
            for gang in list(self._running):
                self._end(gang, "the run was stopped")
        return self._ended

    def _start(self, placement: JobPlacement) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = self._plan.cluster.of_kind(placement.gang.kind)
        names = (placement.gang.kind, "GPU") if nodes is not None and nodes.gpu else (placement.gang.kind,)
        bundles = [dict.fromkeys(names, float(devices)) for _, devices in placement.nodes]
        self._require(placement, bundles)
        strategy = "STRICT_PACK" if len(bundles) == 1 else self._spread
        group = self._ray.util.placement_group(bundles, strategy=strategy, name=placement.job)
        while not group.wait(_POLL_S):
            self._poll()
        agents = []
        for index, (_, devices) in enumerate(placement.nodes):
            options = {
                "num_cpus": 0,
                "num_gpus": devices if "GPU" in names else 0,
                "resources": {placement.gang.kind: float(devices)},
                "max_concurrency": 2,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            }
            agents.append(self._ray.remote(_Agent).options(**options).remote())
        job = self._jobs[placement.job]
        gang = _Gang(job, group, agents, [], self._now())
        self._running.append(gang)
        self._tell(f"{gang.start_s:.1f} s: {job.name} starts on {placement.gang.devices} of {placement.gang.kind}")
        endpoint, problem = self._result_of(agents[0].find_endpoint.remote())
        if problem:
            self._end(gang, problem)
            return
        for rank, agent in enumerate(agents):
            arguments = torchrun_arguments(job, placement, rank, endpoint)
            log = f"{self._logs}/{job.name}-{rank}.log"
            gang.calls.append(agent.run.remote(arguments, str(Path.cwd()), log))

    def _require(self, placement: JobPlacement, bundles: list[dict[str, float]]) -> None:
        """Raise `ClusterError` where the gang would wait for ever."""
        there = self._ray.cluster_resources()
        for kind in bundles[0]:
            needed = sum(bundle[kind] for bundle in bundles)
            if needed > there.get(kind, 0):
                raise ClusterError(
                    f"job {placement.job} needs {needed:g} of {kind}, and the Ray cluster has {there.get(kind, 0):g}; "
                    "start its nodes with --resources, or plan for the cluster that there is"
                )

    def _poll(self) -> None:
        """Look once for processes that have ended."""
        calls = [call for gang in self._running for call in gang.calls]
        if not calls:
            return
        ended, _ = self._ray.wait(calls, num_returns=1, timeout=_POLL_S)
        for gang in [gang for gang in self._running if any(call in ended for call in gang.calls)]:
            done = [call for call in gang.calls if call in ended]
            problem = "; ".join(filter(None, (part for call in done for part in self._result_of(call))))
            gang.calls = [call for call in gang.calls if call not in done]
            if problem or not gang.calls:
                self._end(gang, problem)

    def _result_of(self, call: Any) -> tuple[str, str]:
        """Return the result of a call, or what is wrong if its node is gone."""
        try:
            return self._ray.get(call), ""
        except self._ray.exceptions.RayError as error:
            return "", f"its process was lost: {type(error).__name__}"

    def _end(self, gang: _Gang, problem: str) -> None:
        self._running.remove(gang)
        for agent in gang.agents:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(agent.stop.remote(), timeout=2 * _GRACE_S)
            self._ray.kill(agent)
        self._ray.util.remove_placement_group(gang.group)
        outcome = JobOutcome(job=gang.job.name, start_s=gang.start_s, end_s=self._now(), problem=problem)
        self._ended.append(outcome)
        self._tell(f"{outcome.end_s:.1f} s: {outcome.job} " + (f"failed: {problem}" if problem else "ended"))

    def _now(self) -> float:
        return time.monotonic() - self._begin


class _Agent:
    """The processes of a job on one node; `stop` is called while `run` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def find_endpoint(self) -> str:
        """Return the address of this node with a free port."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as found:
            found.bind(("", 0))
            return f"{address}:{found.getsockname()[1]}"

    def run(self, arguments: list[str], folder: str, log: str) -> str:
        """Run Python with these arguments in a folder, and return why it failed; empty if it did not."""
        path = Path(folder) / log
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._is_stopped:
                self.stop()
            status = self._process.wait()
        return f"exit code {status}, see {log}" if status else ""

    def stop(self) -> None:
        """End the processes, torchrun and those that it started."""
        self._is_stopped = True
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # torchrun passes it on, and waits for its own
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
