"""The arguments of torchrun."""

from __future__ import annotations

from apollo_compile.cluster.launch import fill_in, torchrun_arguments
from apollo_compile.cluster.values import Gang, Job, JobPlacement

GANG = Gang(kind="h100", devices=6, step_s=1.0)
JOB = Job(
    name="a", steps=1, gangs=(GANG,), command=("train.py", "--data={data}", "{devices}", "{tensor}x{stages}", "{x}")
)


def test_every_node_gets_its_rank_and_number_of_processes() -> None:
    """Four on the first and two on the second."""
    placement = JobPlacement(job="a", gang=GANG, nodes=((1, 4), (0, 2)), start_s=0.0, end_s=1.0)
    first, second = (torchrun_arguments(JOB, placement, rank, "10.0.0.1:1234") for rank in range(2))
    options = "--nnodes=2 --node-rank=0 --nproc-per-node=4 --master-addr=10.0.0.1 --master-port=1234"
    assert first[:7] == ["-m", "torch.distributed.run", *options.split()]
    assert second[3:5] == ["--node-rank=1", "--nproc-per-node=2"]


def test_a_command_can_name_how_its_gang_is_split() -> None:
    """All data parallel if nothing else is known; other braces stay."""
    assert fill_in(JOB, GANG) == ["train.py", "--data=6", "6", "1x1", "{x}"]
    split = Gang(kind="h100", devices=8, step_s=1.0, data=2, tensor=2, stages=2)
    assert fill_in(JOB, split) == ["train.py", "--data=2", "8", "2x2", "{x}"]
