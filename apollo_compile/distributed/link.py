"""The link between ranks: latency and bandwidth of the ring that explains how long a collective takes; its messages.

measure_link(collective, rounds, group, device) -> Link
sum_as_one(tensors, group) -> list[Tensor]                  sums over ranks, in one message
sum_gradients(gradients, like, group) -> list[Tensor | None]     the same, where some ranks have none
tell(make, group) -> Any                                    what one rank makes, on all ranks
Failures(group, device)                                     an error on one rank ends waits of the others
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import ApolloError, DeploymentError

WaitFor = Callable[[dist.Work], Any]
"""Waits for a transfer."""

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
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    wait: WaitFor = dist.Work.wait,
    *,
    divided_by: int = 1,
) -> list[torch.Tensor]:
    """Return the sums over ranks of tensors of one type, each divided by a number before; they share memory."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    wait(dist.all_reduce(flat.div_(divided_by) if divided_by > 1 else flat, group=group, async_op=True))
    parts = torch.split(flat, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def sum_gradients(
    gradients: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    wait: WaitFor = dist.Work.wait,
) -> list[torch.Tensor | None]:
    """Return the sums over ranks of gradients of some tensors of one type, in place; None where no rank has one."""
    whole = [torch.zeros_like(own) if each is None else each for each, own in zip(gradients, like, strict=True)]
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in whole]
    is_there = torch.tensor([each is not None for each in gradients], dtype=parts[0].dtype, device=parts[0].device)
    counts, *sums = sum_as_one([is_there, *parts], group, wait)
    torch._foreach_copy_(parts, sums)
    return [each if count else None for each, count in zip(whole, counts.tolist(), strict=True)]


def tell(make: Callable[[], Any], group: dist.ProcessGroup | None, *, source: int = 0) -> Any:
    """Return on all ranks what a function returns on one of them, or raise its `ApolloError`; all ranks call it."""
    told: list[Any] = [None]
    if dist.get_rank(group) == source:
        try:
            told = [make()]
        except ApolloError as error:
            told = [error]
    dist.broadcast_object_list(told, group=group, group_src=source)
    if isinstance(told[0], ApolloError):
        raise told[0]
    return told[0]


class Failures:
    """The first failure of work on any rank of a group, which ends waits of the others; all ranks make it alike."""

    _numbers = itertools.count()

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._store, self._key, self._found = group.get_group_store(), f"apollo_compile {next(self._numbers)}", ""
        self._patience = (timedelta(seconds=1),) if device.type == "cpu" else ()  # others wait on the device

    @contextlib.contextmanager
    def telling(self, modules: Iterable[str]) -> Iterator[None]:
        """Let all ranks know if work of modules fails here; afterwards this rank does no more of it."""
        if self._found:
            raise DeploymentError(self._found)
        try:
            yield
        except Exception as error:
            names, rank = " and ".join(map(repr, modules)), dist.get_rank()
            own = f"module {names} failed on rank {rank}, so all ranks stop: {type(error).__name__}: {error}"
            self._found = self._store.compare_set(self._key, "", own).decode()
            error.add_note(self._found)
            raise

    def wait(self, work: dist.Work) -> bool:
        """Wait for a transfer, or until work has failed on a rank, which is an error."""
        while True:
            try:
                return work.wait(*self._patience)
            except RuntimeError as error:
                if self._store.check([self._key]):
                    self._found = self._store.get(self._key).decode()
                    raise DeploymentError(self._found) from error
                if work.is_completed():  # since then, or it failed
                    return work.wait()
