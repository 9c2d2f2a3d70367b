"""Commands of jobs: torchrun on one node of a gang, and scripts for Slurm.

    torchrun_arguments(job, placement, node_rank, endpoint) -> ["-m", "torch.distributed.run", "--nnodes=2", ...]
    slurm_scripts(plan) -> {"clip.sh": "#!/bin/bash...", "submit.sh": ...}

In the command of a job, `{devices}`, `{data}`, `{tensor}` and `{stages}` are replaced by those of its gang.

Slurm places the jobs itself; a script asks for the number of nodes and devices of its gang. Later jobs have a larger
`--nice`, so that jobs start in the plan's order where both could.
"""

from __future__ import annotations

import math
import re
import shlex

from apollo_compile.cluster.values import ClusterPlan, Gang, Job, JobPlacement, Nodes
from apollo_compile.errors import ClusterError

SUBMIT = "submit.sh"

_SLACK = 1.5
"""Factor from the planned duration to a script's time limit."""


def torchrun_arguments(job: Job, placement: JobPlacement, node_rank: int, endpoint: str) -> list[str]:
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


def slurm_scripts(plan: ClusterPlan) -> dict[str, str]:
    """Return the text of every script by file name.

    Raises:
        ClusterError: a job has no command, its nodes have different numbers of devices, or its name is no file name.
    """
    check_plan(plan)
    jobs = {job.name: job for job in plan.jobs}
    scripts = {}
    for place, each in enumerate(plan.placements):
        if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", each.job) or f"{each.job}.sh" == SUBMIT:
            expected = f"letters, digits, '_', '.' and '-', no '-' first, and another name than {SUBMIT}'s"
            raise ClusterError(f"job {each.job!r} cannot name a script: expected {expected}; rename the job")
        nodes = plan.cluster.of_kind(each.gang.kind)
        assert nodes is not None, "check_plan looked"
        scripts[f"{each.job}.sh"] = _script(jobs[each.job], each, nodes, place)
    lines = [f"sbatch {each.job}.sh" for each in plan.placements]
    scripts[SUBMIT] = "\n".join(("#!/bin/bash", "set -e", 'cd "$(dirname "$0")"', *lines, ""))
    return scripts


def _script(job: Job, placement: JobPlacement, nodes: Nodes, place: int) -> str:
    per_node = {devices for _, devices in placement.nodes}
    if len(per_node) > 1:
        raise ClusterError(
            f"job {job.name} has {sorted(per_node)} devices on its nodes, and Slurm gives all nodes of a job the same "
            "number: plan with gangs of whole nodes"
        )
    (devices,) = per_node
    asked = f"--gres=gpu:{nodes.kind}:{devices}" if nodes.gpu else f"--cpus-per-task={devices}"
    minutes = max(1, math.ceil(_SLACK * (placement.end_s - placement.start_s) / 60))
    command = " ".join(shlex.quote(part) for part in fill_in(job, placement.gang))
    return "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={job.name}",
            f"#SBATCH --nodes={len(placement.nodes)}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH {asked}",
            f"#SBATCH --time={minutes}",
            f"#SBATCH --nice={10 * place}",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))  # jobs may share a node",
            f"srun --kill-on-bad-exit=1 torchrun --nnodes={len(placement.nodes)} --nproc-per-node={devices} "
            '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port" '
            f"{command}",
            "",
        )
    )
