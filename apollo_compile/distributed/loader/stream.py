"""A batch sampler that balances ranks, for streams, in which the size of a sample is known only when it is read.

    BalancedStreamSampler(stream, batch_size=8)

Every rank reads its own stream of keys with costs. For every step the ranks of a group exchange their keys and costs,
in one all-gather, and each computes the same assignment. With a key, such as a file and a position in it, the data set
can load the sample on any rank of the group; samples are not sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from apollo_compile.distributed.loader.costs import to_nanoseconds
from apollo_compile.distributed.loader.shares import Layout, share_out
from apollo_compile.errors import SampleError

Key = TypeVar("Key")


class BalancedStreamSampler(Sampler[list[Key]], Generic[Key]):
    """Yields this rank's micro-batches, as lists of keys, for `DataLoader(batch_sampler=...)`.

    The epoch ends on all ranks of a group when one of their streams has too few samples for a step; the samples that
    other ranks have read for that step are dropped. Streams of several groups must have the same number of steps, or be
    endless.

    Arguments:
        stream: yields (key, seconds by phase), as from `ModuleCosts.phases`; every rank has a different stream. A key
            can be pickled.
        batch_size: mean number of samples of a micro-batch.
        micro_batches: number of micro-batches of an optimizer step on each rank.
        group: ranks among which samples move; None is all. gloo is best, since costs are on the CPU.
        even_counts: give all micro-batches of a step the same number of samples.

    Raises:
        SampleError: a cost is negative or not a finite number; the error is raised on all ranks of the group.
    """

    def __init__(
        self,
        stream: Iterable[tuple[Key, Sequence[float]]],
        *,
        batch_size: int,
        micro_batches: int = 1,
        group: dist.ProcessGroup | None = None,
        even_counts: bool = False,
    ) -> None:
        self._stream, self._group = stream, group
        size = dist.get_world_size(group)
        self.layout = Layout(
            batch_size=batch_size, micro_batches=micro_batches, num_ranks=size, group_size=size, even_counts=even_counts
        )

    def __iter__(self) -> Iterator[list[Key]]:
        stream, layout = iter(self._stream), self.layout
        num_own = layout.batch_size * layout.micro_batches
        place = dist.get_rank(self._group)
        while True:
            everyone: list[list[tuple[Key, Sequence[float]]]] = [[] for _ in range(layout.num_ranks)]
            dist.all_gather_object(everyone, list(itertools.islice(stream, num_own)), group=self._group)
            if min(map(len, everyone)) < num_own:
                return
            keys = [key for read in everyone for key, _ in read]
            costs_ns = to_nanoseconds(_costs_of(everyone), names=keys)
            slots = share_out(costs_ns[None], layout)[0]
            for number in range(place, layout.num_slots, layout.group_size):
                yield [keys[sample] for sample in (slots == number).nonzero()[0]]


def _costs_of(everyone: Sequence[Sequence[tuple[Any, Sequence[float]]]]) -> list[Sequence[float]]:
    """Return the costs of all samples, after checking that they have equally many phases.

    Raises:
        SampleError: a sample has no costs, or another number of phases than the first.
    """
    found: list[Sequence[float]] = []
    for rank, read in enumerate(everyone):
        for key, seconds in read:
            own = list(seconds) if isinstance(seconds, Iterable) else []
            if not own or (found and len(own) != len(found[0])):
                expected = f"{len(found[0])} numbers" if found else "a number per phase"
                raise SampleError(f"sample {key!r} of rank {rank} has costs {seconds!r}: expected {expected}")
            found.append(own)
    return found
