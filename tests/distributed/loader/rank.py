"""What every rank of the loader's tests does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apollo_compile import BalancedBatchSampler, BalancedStreamSampler, ModuleCosts, share_costs, weigh_loss
from apollo_compile.distributed.loader.costs import ModuleTable
from apollo_compile.errors import SampleError
from tests.distributed.work import SIZE, Result, Scenario

LENGTHS = [1 + 37 * number % 29 for number in range(30)]
"""Tokens of the samples."""


def share(rank: int) -> Result:
    """Return what a rank saw of everything that ranks share."""
    return {
        "gradients": [compare_gradients(1), compare_gradients(2)],
        "costs": share_costs(costs_of(rank)).digest,
        "own costs": costs_of(rank).digest,
        "costs of one": share_costs(costs_of(rank) if rank == 0 else None).digest,
        "stream": read_stream(rank),
        "bad stream": read_bad_stream(rank),
    }


SCENARIOS: dict[int, dict[str, Scenario]] = {SIZE: {"share": share}}


def costs_of(rank: int) -> ModuleCosts:
    """Return costs that differ between ranks."""
    return ModuleCosts(sizes=(), modules=(ModuleTable(name="", sizes=(), nodes=(), seconds=(1.0 + rank,)),))


def compare_gradients(micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Return, by step, this rank's gradient, that of one process, and the samples of this rank."""
    torch.manual_seed(0)
    samples = [torch.randn(length, 8) for length in LENGTHS]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    parallel = DistributedDataParallel(model)

    def mean_loss(run: nn.Module, batch: Sequence[int]) -> tuple[torch.Tensor, int]:
        tokens = torch.cat([samples[number] for number in batch])
        return run(tokens).square().mean(), len(tokens)

    def flat_gradient() -> torch.Tensor:
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
        return found.clone()

    samplers = [
        BalancedBatchSampler(LENGTHS, batch_size=2, micro_batches=micro_batches, num_replicas=SIZE, rank=rank)
        for rank in range(SIZE)
    ]
    own = list(samplers[dist.get_rank()])
    everyone = [list(sampler) for sampler in samplers]
    found = []
    for step in range(samplers[0].num_steps):
        micro = range(step * micro_batches, (step + 1) * micro_batches)
        whole = [number for batches in everyone for index in micro for number in batches[index]]
        total = sum(LENGTHS[number] for number in whole) if micro_batches > 1 else None
        for index in micro:
            parallel.require_backward_grad_sync = index == micro[-1]
            loss, tokens = mean_loss(parallel, own[index])
            weigh_loss(loss, tokens, total=total).backward()
        shared = flat_gradient()
        mean_loss(model, whole)[0].backward()
        found.append((shared, flat_gradient(), [number for index in micro for number in own[index]]))
    return found


def read_stream(rank: int) -> dict[str, Any]:
    """Return what this rank read and which keys it got; the streams have 21 and 34 samples."""
    read: list[str] = []

    def stream() -> Iterator[tuple[str, list[float]]]:
        for number in range(21 + 13 * rank):
            read.append(f"{rank}:{number}")
            yield read[-1], cost_of(read[-1])

    return {"got": list(BalancedStreamSampler(stream(), batch_size=4)), "read": read}


def cost_of(key: str) -> list[float]:
    """Return the seconds of a sample of a stream: those of rank 0 are heavy in one phase, the others in the other."""
    rank, number = map(int, key.split(":"))
    return [number + 1.0, 0.1] if rank == 0 else [0.1, number + 1.0]


def read_bad_stream(rank: int) -> str:
    """Return the error that a sample of rank 1 causes."""
    stream = [(f"{rank}:{number}", [math.nan if (rank, number) == (1, 2) else 1.0]) for number in range(4)]
    try:
        list(BalancedStreamSampler(stream, batch_size=4))
    except SampleError as error:
        return str(error)
    return "no error"
