"""Scripts for Slurm: one per job of a plan, and one that submits them in the plan's order.

    slurm_scripts(plan) -> {"clip.sh": "#!/bin/bash...", "submit.sh": ...}

Slurm places the jobs itself; a script asks for the number of nodes and devices of its gang. Later jobs have a larger
`--nice`, so that jobs start in the plan's order where both could.
"""

from __future__ import annotations

import math
import re
import shlex

from apollo_compile.cluster.launch import check_plan, fill_in
from apollo_compile.cluster.values import ClusterPlan, Job, Nodes, Placement
from apollo_compile.errors import ClusterError

SUBMIT = "submit.sh"

_SLACK = 1.5
"""Factor from the planned duration to the time limit."""


def slurm_scripts(plan: ClusterPlan) -> dict[str, str]:
    """Return the text of every script by file name.

    Raises:
        ClusterError: a job has no command, its nodes have different numbers of devices, or its name is no file name.
    """
    check_plan(plan)
    jobs = {job.name: job for job in plan.jobs}
    scripts = {}
    for place, each in enumerate(plan.placements):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", each.job):
            raise ClusterError(f"job {each.job!r} cannot name a script: expected letters, digits, '_', '.' and '-'")
        nodes = plan.cluster.of_kind(each.gang.kind)
        assert nodes is not None, "check_plan looked"
        scripts[f"{each.job}.sh"] = _script(jobs[each.job], each, nodes, place)
    lines = [f"sbatch {each.job}.sh" for each in plan.placements]
    scripts[SUBMIT] = "\n".join(("#!/bin/bash", "set -e", 'cd "$(dirname "$0")"', *lines, ""))
    return scripts


def _script(job: Job, placement: Placement, nodes: Nodes, place: int) -> str:
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
