"""Measure the link between ranks: latency and bandwidth of the ring that explains how long a collective takes.

measure_link(collective, rounds, group, device) -> Link
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
