"""Assignment of the samples of a step to ranks and micro-batches.

    samples_of_steps(order, layout, ...)    the samples of steps, by group of ranks
    share_out(costs_ns, layout)             their slots, balanced
    share_in_turn(num_samples, layout)      their slots as `DistributedSampler` deals them

A slot is a micro-batch of a rank: number of the micro-batch times ranks of the group, plus the rank's place in it.

Micro-batches with the same number run at the same time on all ranks of a group, and with FSDP each has collectives. So
bins are sorted by load and the heaviest go into the first micro-batch, one to each rank, and so on. Every other
micro-batch is in reverse order, which balances ranks over the whole step. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apollo_compile.distributed.loader.assign import Integers, add_up, assign_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Numbers of ranks, micro-batches and samples of a step.

    Raises:
        ValueError: a number is below 1, or `group_size` does not divide `num_ranks`.
    """

    batch_size: int
    """Mean number of samples of a micro-batch."""
    micro_batches: int
    num_ranks: int
    group_size: int
    """Number of ranks among which samples move; a divisor of `num_ranks`."""
    even_counts: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("batch_size", "micro_batches", "num_ranks", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.num_ranks % self.group_size:
            raise ValueError(f"group_size is {self.group_size}: expected a divisor of {self.num_ranks} ranks")

    @property
    def step_size(self) -> int:
        """Number of samples of an optimizer step, over all ranks."""
        return self.batch_size * self.micro_batches * self.num_ranks

    @property
    def num_slots(self) -> int:
        """Number of micro-batches of a step, over the ranks of a group."""
        return self.micro_batches * self.group_size


def samples_of_steps(order: Integers, layout: Layout, first: int, last: int, group: int) -> Iterator[Integers]:
    """Yield the samples of one group in steps `first` to `last` - 1, as (steps, samples) arrays.

    Only the last step of an epoch may have fewer samples; it is a separate array. If it has fewer samples than
    micro-batches, the first samples of the epoch are repeated.
    """
    size, ranks = layout.step_size, layout.num_ranks
    columns = slice(group * layout.group_size, (group + 1) * layout.group_size)
    num_full = len(order) // size
    full = order[first * size : min(last, num_full) * size]
    if len(full):
        yield full.reshape(-1, size // ranks, ranks)[:, :, columns].reshape(len(full) // size, -1)
    if last > num_full:
        rest = order[num_full * size :]
        missing = ranks * layout.micro_batches - len(rest)
        if missing > 0:
            rest = np.concatenate([rest, np.resize(order, missing)])
        place = np.arange(len(rest)) % ranks
        yield rest[(place >= columns.start) & (place < columns.stop)][None, :]


def share_out(costs_ns: Integers, layout: Layout) -> Integers:
    """Return the (steps, samples) slots of the samples of one group.

    Arguments:
        costs_ns: (steps, samples, phases) nanoseconds.
        layout: layout of the step; a group has at least one sample per slot.
    """
    bins = assign_samples(costs_ns, layout.num_slots, is_even=layout.even_counts)
    total = add_up(costs_ns, bins, layout.num_slots).sum(axis=2)
    by_load = np.argsort(-total, axis=1, kind="stable")
    micro_batch, place = np.divmod(np.arange(layout.num_slots), layout.group_size)
    place = np.where(micro_batch % 2 == 0, place, layout.group_size - 1 - place)
    slot_of_bin = np.empty_like(by_load)
    np.put_along_axis(slot_of_bin, by_load, (micro_batch * layout.group_size + place)[None, :], axis=1)
    return np.take_along_axis(slot_of_bin, bins, axis=1)


def share_in_turn(num_samples: int, layout: Layout) -> Integers:
    """Return the (samples,) slots of the samples of one group, as `DistributedSampler` deals them."""
    row, place = np.divmod(np.arange(num_samples), layout.group_size)
    num_rows = -(-num_samples // layout.group_size)
    per_batch = -(-num_rows // layout.micro_batches)
    return row // per_batch * layout.group_size + place
