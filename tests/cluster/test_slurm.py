"""Scripts for Slurm."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from apollo_compile.cluster.launch import SUBMIT, slurm_scripts
from apollo_compile.cluster.plan import plan_jobs
from apollo_compile.cluster.values import Cluster, Gang, Job, Nodes
from apollo_compile.errors import ClusterError

CLUSTER = Cluster(nodes=(Nodes(kind="h100", count=2, devices=4, gpu=True), Nodes(kind="cpu1", count=1, devices=2)))
WIDE = Job(
    name="wide",
    steps=100,
    gangs=(Gang(kind="h100", devices=8, step_s=6.0, data=4, tensor=2, stages=1),),
    command=("train.py", "--tensor", "{tensor}", "--name", "a b"),
)
NARROW = Job(name="narrow", steps=1, gangs=(Gang(kind="cpu1", devices=2, step_s=1.0),), command=("train.py",))


def test_a_script_asks_for_the_gang_and_runs_torchrun() -> None:
    """Ten minutes and half as much again, two nodes with four GPUs each."""
    script = slurm_scripts(plan_jobs(CLUSTER, [WIDE]))["wide.sh"]
    for line in ("--nodes=2", "--gres=gpu:h100:4", "--time=15", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in script
    assert "torchrun --nnodes=2 --nproc-per-node=4" in script
    assert script.endswith("train.py --tensor 2 --name 'a b'\n")


def test_cores_are_no_gpus() -> None:
    """They are counted as CPUs of the task."""
    script = slurm_scripts(plan_jobs(CLUSTER, [NARROW]))["narrow.sh"]
    assert "#SBATCH --cpus-per-task=2\n" in script and "gres" not in script and "#SBATCH --time=1\n" in script


def test_jobs_are_submitted_in_the_order_of_the_plan_and_all_scripts_parse() -> None:
    """By bash itself."""
    plan = plan_jobs(CLUSTER, [WIDE, NARROW])
    scripts = slurm_scripts(plan)
    assert scripts[SUBMIT].splitlines()[3:] == [f"sbatch {each.job}.sh" for each in plan.placements]
    for text in scripts.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replace(NARROW, command=()), "job narrow has no command: expected the arguments of torchrun"),
        *((replace(NARROW, name=name), f"job '{name}' cannot name a script") for name in ("a/b", "submit", "-x")),
        (
            replace(WIDE, gangs=(Gang(kind="h100", devices=5, step_s=1.0),)),
            r"job wide has \[1, 4\] devices on its nodes",
        ),
    ],
)
def test_what_slurm_cannot_run_is_an_error(job: Job, message: str) -> None:
    """Before anything is written."""
    with pytest.raises(ClusterError, match=message):
        slurm_scripts(plan_jobs(CLUSTER, [job]))
