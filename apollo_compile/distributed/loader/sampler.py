"""A batch sampler that balances ranks, for data sets whose sizes are known.

    BalancedBatchSampler(costs, batch_size=8)

The samples of an optimizer step are those that `torch.utils.data.DistributedSampler` with the same seed would give all
ranks together in that step; only their ranks and micro-batches differ (`shares.py`). Every rank computes the same
assignment from the same costs and seed, without communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from apollo_compile.distributed.loader.assign import Integers, add_up
from apollo_compile.distributed.loader.balance import Balance
from apollo_compile.distributed.loader.costs import to_nanoseconds
from apollo_compile.distributed.loader.ranks import find_rank
from apollo_compile.distributed.loader.shares import Layout, samples_of_steps, share_in_turn, share_out

_CHUNK = 2**14
"""Number of samples that are assigned at once."""


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches, as lists of indices, for `DataLoader(batch_sampler=...)`.

    Micro-batches have different numbers of samples, so their mean losses must be weighted: `weigh_loss`.

    Arguments:
        costs: (samples, phases) seconds of each sample in each phase of a step, as from `ModuleCosts.phases`; a plain
            list is one phase. They must be equal on every rank.
        batch_size: mean number of samples of a micro-batch.
        micro_batches: number of micro-batches of an optimizer step on each rank.
        num_replicas: number of ranks; by default, of the process group.
        rank: this rank; by default, in the process group.
        group_size: number of ranks among which samples may move, such as those of one node; None is all. Ranks of a
            group are consecutive.
        even_counts: give all micro-batches of a step the same number of samples, or one more.
        shuffle: whether the order is random and different in every epoch.
        seed: seed of the order; it must be equal on every rank.
        drop_last: drop the samples that do not fill a whole step. Otherwise the last step has fewer samples; if they
            are fewer than micro-batches, the first samples of the epoch are repeated, as in `DistributedSampler`.

    Raises:
        SampleError: a cost is negative or not a finite number.
        ValueError: a number is below 1, `group_size` does not divide the ranks, or there is no whole step.
    """

    def __init__(
        self,
        costs: ArrayLike,
        *,
        batch_size: int,
        micro_batches: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        group_size: int | None = None,
        even_counts: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._costs_ns = to_nanoseconds(costs)
        num_ranks, self.rank = find_rank(num_replicas, rank)
        self.layout = Layout(
            batch_size=batch_size,
            micro_batches=micro_batches,
            num_ranks=num_ranks,
            group_size=num_ranks if group_size is None else group_size,
            even_counts=even_counts,
        )
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        if not self.num_steps:
            raise ValueError(
                f"there are {len(self._costs_ns)} samples, but a step needs {self.layout.step_size}: expected enough "
                "for one step"
            )
        self.epoch = 0
        self._position = 0
        self._resumes = False

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of an epoch."""
        full, rest = divmod(len(self._costs_ns), self.layout.step_size)
        return full + (1 if rest and not self.drop_last else 0)

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in an epoch."""
        return self.num_steps * self.layout.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        if not self._resumes:
            self._position = 0
        self._resumes = False
        order = self._order()
        first, num_given = divmod(self._position, self.layout.micro_batches)
        for batches in self._own_steps(order, first):
            for batch in batches[num_given:]:
                self._position += 1  # before the yield, so that `state_dict` counts the batch
                yield batch
            num_given = 0

    def _own_steps(self, order: Integers, first: int) -> Iterator[list[list[int]]]:
        """Yield this rank's micro-batches of every step from `first` on."""
        group, place = divmod(self.rank, self.layout.group_size)
        own = range(place, self.layout.num_slots, self.layout.group_size)
        per_chunk = max(1, _CHUNK // self.layout.step_size)
        for begin in range(first, self.num_steps, per_chunk):
            end = min(begin + per_chunk, self.num_steps)
            for samples in samples_of_steps(order, self.layout, begin, end, group):
                slots = share_out(self._costs_ns[samples], self.layout)
                for row, slot in zip(samples, slots, strict=True):
                    yield [row[slot == number].tolist() for number in own]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order if `shuffle` is set; it must be equal on every rank."""
        if epoch != self.epoch:  # another epoch begins at its beginning, also in a state of before its first batch
            self.epoch, self._position, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank: the epoch, and the number of its micro-batches that were yielded."""
        return {"epoch": self.epoch, "position": self._position, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next iteration begins with the micro-batch after it.

        Raises:
            ValueError: the state has other costs or settings, with which other batches would follow.
        """
        if state["digest"] != self.digest:
            raise ValueError(
                f"the state is of a sampler {state['digest']}, and this is {self.digest}: expected the same costs, "
                "seed, batch size, micro-batches, ranks and groups, since other batches would follow; save the costs "
                "with the checkpoint"
            )
        self.epoch, self._position, self._resumes = int(state["epoch"]), int(state["position"]), True

    @property
    def digest(self) -> str:
        """Hash of costs and settings without the rank; it must be equal on all ranks."""
        settings = (*astuple(self.layout), self.shuffle, self.seed, self.drop_last, self._costs_ns.shape)
        return hashlib.sha256(repr(settings).encode() + self._costs_ns.tobytes()).hexdigest()[:16]

    def balance(self, steps: int = 32, *, phases: Sequence[str] | None = None) -> Balance:
        """Return the loads of all ranks in the first steps of this epoch, balanced and with samples dealt in turn.

        Arguments:
            steps: number of optimizer steps.
            phases: names of the columns of the costs.
        """
        layout, order = self.layout, self._order()
        before: list[Integers] = []
        after: list[Integers] = []
        for group in range(layout.num_ranks // layout.group_size):
            loads: tuple[list[Integers], list[Integers]] = [], []
            for samples in samples_of_steps(order, layout, 0, min(steps, self.num_steps), group):
                costs = self._costs_ns[samples]
                in_turn = np.broadcast_to(share_in_turn(samples.shape[1], layout), samples.shape)
                for found, slots in zip(loads, (in_turn, share_out(costs, layout)), strict=True):
                    found.append(add_up(costs, slots, layout.num_slots))
            for all_groups, found in zip((before, after), loads, strict=True):
                all_groups.append(np.concatenate(found).reshape(-1, layout.group_size, self._costs_ns.shape[1]))
        num_phases = self._costs_ns.shape[1]
        return Balance(
            phases=tuple(phases) if phases is not None else tuple(f"phase {number}" for number in range(num_phases)),
            before_ns=np.concatenate(before, axis=1),
            after_ns=np.concatenate(after, axis=1),
        )

    def _order(self) -> Integers:
        num_samples = len(self._costs_ns)
        if not self.shuffle:
            return np.arange(num_samples)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(num_samples, generator=generator).numpy()
