"""The command of a job on one node of its gang: torchrun with the job's arguments.

    torchrun_arguments(job, placement, node_rank, endpoint) -> ["-m", "torch.distributed.run", "--nnodes=2", ...]

In the command of a job, `{devices}`, `{data}`, `{tensor}` and `{stages}` are replaced by those of its gang.
"""

from __future__ import annotations

from apollo_compile.cluster.values import ClusterPlan, Gang, Job, Placement
from apollo_compile.errors import ClusterError


def torchrun_arguments(job: Job, placement: Placement, node_rank: int, endpoint: str) -> list[str]:
    """Return the arguments of Python for the processes of a job on one of its nodes.

    Arguments:
        job: the job, with a command.
        placement: its nodes.
        node_rank: which of them.
        endpoint: address and port of the first node, as `host:port`.

    Raises:
        ClusterError: the job has no command.
    """
    host, _, port = endpoint.rpartition(":")
    return [
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(placement.nodes)}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={placement.nodes[node_rank][1]}",
        f"--master-addr={host}",
        f"--master-port={port}",
        *fill_in(job, placement.gang),
    ]


def fill_in(job: Job, gang: Gang) -> list[str]:
    """Return the command of a job for its gang.

    Raises:
        ClusterError: the job has no command.
    """
    if not job.command:
        raise ClusterError(
            f"job {job.name} has no command: expected the arguments of torchrun, as in command = ['train.py']"
        )
    known = {
        "devices": gang.devices,
        "data": gang.data or gang.devices,
        "tensor": gang.tensor or 1,
        "stages": gang.stages or 1,
    }
    filled = list(job.command)
    for name, value in known.items():
        filled = [part.replace(f"{{{name}}}", str(value)) for part in filled]
    return filled


def check_plan(plan: ClusterPlan) -> None:
    """Raise `ClusterError` for a placement of an unknown job, on an unknown kind, or of a job with no command."""
    jobs = {job.name: job for job in plan.jobs}
    for each in plan.placements:
        if each.job not in jobs:
            raise ClusterError(f"the plan places job {each.job}, and has only: {', '.join(jobs)}")
        if plan.cluster.of_kind(each.gang.kind) is None:
            raise ClusterError(f"the plan places job {each.job} on {each.gang.kind}, which its cluster does not have")
        fill_in(jobs[each.job], each.gang)
