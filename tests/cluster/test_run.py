"""Plans run on Ray, with torchrun and real training inside, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import apollo_compile
from apollo_compile.cluster.files import format_plan_file, read_plan
from apollo_compile.cluster.run import run_plan
from apollo_compile.cluster.values import Cluster, ClusterPlan, Gang, Job, JobPlacement, Nodes
from apollo_compile.errors import ClusterError

pytest.importorskip("ray")

SCRIPT = """
import sys

num_steps = int(sys.argv[1])
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
weight = torch.randn(16, 16, requires_grad=True)  # an optimizer or DDP would import Dynamo first
for _ in range(num_steps):
    (gradient,) = torch.autograd.grad((torch.randn(8, 16) @ weight).square().mean(), weight)
    dist.all_reduce(gradient)
    weight.data -= 0.1 * gradient
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()
"""


def job(name: str, devices: int, steps: str) -> Job:
    """Return a job of the script."""
    gang = Gang(kind="cpu1", devices=devices, step_s=0.01)
    return Job(name=name, steps=1, gangs=(gang,), command=("train.py", steps))


def save(path: Path, *jobs: Job, num_nodes: int = 1) -> None:
    """Write a plan with these jobs one after the other, on two devices in one node or on two."""

    def place(at: int, job: Job) -> JobPlacement:
        (gang,) = job.gangs
        nodes = tuple((node, gang.devices // num_nodes) for node in range(num_nodes))
        return JobPlacement(job=job.name, gang=gang, nodes=nodes, start_s=float(at), end_s=at + 1.0)

    placements = tuple(place(*each) for each in enumerate(jobs))
    cluster = Cluster(nodes=(Nodes(kind="cpu1", count=num_nodes, devices=2 // num_nodes),))
    numbers = dict.fromkeys(("value_s", "bound_s", "makespan_s", "mean_completion_s", "samples_per_s"), 1.0)
    plan = ClusterPlan(objective="mean", cluster=cluster, jobs=jobs, placements=placements, **numbers)
    path.write_text(format_plan_file(plan))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the plan in a folder by the command."""
    root = str(Path(apollo_compile.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from apollo_compile.tools.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "cluster", "run", "plan.json", "--json", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
def test_jobs_run_as_gangs_in_the_order_of_the_plan_and_a_failure_frees_its_devices(tmp_path: Path) -> None:
    """The first job fails; the second waits for both devices, and the third, which could start, for the second."""
    (tmp_path / "train.py").write_text(SCRIPT)
    save(tmp_path / "plan.json", job("fails", 1, "none"), job("wide", 2, "5"), job("narrow", 1, "3"))
    done = run(tmp_path)
    assert done.returncode == 1 and done.stdout, done.stderr
    ended: dict[str, Any] = {each["job"]: each for each in json.loads(done.stdout)}
    assert list(ended) == ["fails", "wide", "narrow"]
    assert ended["fails"]["problem"] == "exit code 1, see logs/fails-0.log"
    assert "invalid literal for int" in (tmp_path / "logs" / "fails-0.log").read_text()
    assert not ended["wide"]["problem"] and not ended["narrow"]["problem"]
    assert ended["wide"]["start_s"] >= ended["fails"]["end_s"]
    assert ended["narrow"]["start_s"] >= ended["wide"]["end_s"]
    log = (tmp_path / "logs" / "wide-0.log").read_text()  # two processes write, so lines may be mixed
    assert "rank 0 of 2" in log and "rank 1 of 2" in log
    assert "rank 0 of 1" in (tmp_path / "logs" / "narrow-0.log").read_text()


NODES = """
import sys, time
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
for _ in range(2):
    cluster.add_node(num_cpus=1, resources={"cpu1": 1})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_gang_spans_the_nodes_of_a_ray_cluster_or_is_an_error_if_it_can_never_hold_it(tmp_path: Path) -> None:
    """Two nodes, which Ray pretends to have on this machine, with a device each: two torchruns are one job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-c", NODES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdin is not None and nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        save(tmp_path / "plan.json", job("huge", 3, "1"))
        refused = run(tmp_path, "--address", address)
        save(tmp_path / "plan.json", job("wide", 2, "2"), num_nodes=2)
        done = run(tmp_path, "--address", address)
        nodes.stdin.close()
    assert refused.returncode == 1
    assert "job huge needs 3 of cpu1, and the Ray cluster has 2; start its nodes with --resources" in refused.stderr
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "logs" / f"wide-{rank}.log").read_text() for rank in range(2)]
    assert [f"rank {rank} of 2" in log for rank, log in enumerate(logs)] == [True, True]


def test_a_plan_without_commands_is_refused_before_ray_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the job's name."""
    save(tmp_path / "plan.json", Job(name="idle", steps=1, gangs=(Gang(kind="cpu1", devices=1, step_s=1.0),)))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match="job idle has no command"):
        run_plan(read_plan(tmp_path / "plan.json"), logs=tmp_path)
