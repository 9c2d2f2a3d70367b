"""A batch sampler that gives every rank the same time, for streams, whose sizes are known only when a sample comes.

    BalancedStreamSampler(stream, batch_size=8)

Every rank reads its own stream of keys with costs. For every step the ranks of a group exchange what they read, in one
all-gather, and each computes the same assignment. A key is what the data set needs to load a sample on any rank of the
group, such as a file and a place in it: samples themselves are not sent.
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

    The epoch ends on all ranks of a group when one of their streams has not enough for a step; what the others have
    read for that step is left out. Streams of several groups must have the same number of steps, or be endless.

    Arguments:
        stream: yields (key, seconds by phase), as from `ModuleCosts.phases`; another stream on every rank. A key can be
            pickled.
        batch_size: samples of a micro-batch, on average.
        micro_batches: of an optimizer step, on each rank.
        group: ranks among which samples move; None is all. Best over gloo, since sizes are on the CPU.
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
            batch_size=batch_size,
            micro_batches=micro_batches,
            num_ranks=size,
            group_size=size,
            even_counts=even_counts,
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
    """Return the costs of all samples; all of them have as many phases.

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
