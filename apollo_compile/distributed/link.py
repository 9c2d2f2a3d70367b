"""The link between ranks: latency and bandwidth of the ring that explains how long a collective takes; its messages.

measure_link(collective, rounds, group, device) -> Link
sum_as_one(tensors, group) -> list[Tensor]                  sums over ranks, in one message
tell(value, group) -> Any                                   the value of one rank on all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apollo_compile.cost_model.collectives import Link

BYTES = 1 << 22
"""Size of the larger message; the smaller one has an element per rank."""

WARM_UPS, TIMES = 2, 25


def measure_link(
    collective: Callable[[torch.Tensor], object], rounds: int, group: dist.ProcessGroup | None, device: torch.device
) -> Link:
    """Return the link with which a ring is as fast as the slowest rank is here; all ranks call it.

    Arguments:
        collective: what is timed; it gets a flat tensor, which it may change.
        rounds: times that each rank sends a part to its neighbour in it.
        group: the ranks; None is all.
        device: where the tensor is.
    """
    size, times = dist.get_world_size(group), []
    if size == 1:
        return Link(latency=0.0, bandwidth=1e12)
    for elements in (size, BYTES // 4 // size * size):
        message = torch.zeros(elements, device=device)
        spans = torch.empty(WARM_UPS + TIMES, dtype=torch.float64, device=device)
        for index in range(len(spans)):
            dist.barrier(group=group)
            begin = time.perf_counter()
            collective(message)
            message[0].item()  # waits for the device
            spans[index] = time.perf_counter() - begin
        dist.all_reduce(spans, op=dist.ReduceOp.MAX, group=group)
        times.append(spans[WARM_UPS:].mean().item())  # a step waits for many of them: their sum counts
    return Link(latency=times[0] / rounds, bandwidth=rounds * BYTES / size / max(times[1] - times[0], 1e-6))


def sum_as_one(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, *, divided_by: int = 1
) -> list[torch.Tensor]:
    """Return the sums over ranks of tensors of one type, each divided by a number before; they share memory."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.all_reduce(flat.div_(divided_by) if divided_by > 1 else flat, group=group)
    parts = torch.split(flat, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def tell(value: Any, group: dist.ProcessGroup | None, *, source: int = 0) -> Any:
    """Return the value that one rank of a group has, on all ranks; they call it alike."""
    told = [value]
    dist.broadcast_object_list(told, group=group, group_src=source)
    return told[0]
