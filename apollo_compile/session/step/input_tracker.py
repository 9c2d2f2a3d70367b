"""Find inputs of a loss graph, besides the model's tensors, that are the same for all micro-batches, or in all steps.

A teacher's weights or the weights of classes are such inputs: only their memory tells them from parts of the batch.
Memory is identified by storage and address, since every split makes new tensors, and a new batch may be at the address
of the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_compile.torch_bridge.storages import storages_of

FEWEST_STEPS = 3
"""Number of steps in a row after which a tensor at the same address counts as stable."""


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """Inputs of the forward besides the tensors of the model, by place."""

    shared: frozenset[int] = frozenset()
    """Inputs that are the same for all micro-batches of a step."""
    stable: frozenset[int] = frozenset()
    """Shared inputs that were the same in the last steps."""


@dataclass(slots=True)
class _Seen:
    storages: frozenset[StorageWeakRef]
    """Empty for a tensor without storage, which is like no other."""
    address: int
    since: int
    """The step in which it was seen first."""
    latest: int
    """The step in which it was seen last."""


class InputTracker:
    """Tracks the tensors that a graph gets as its inputs, by place."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self.num_steps = self._latest_step = 0
        self._differing: set[int] = set()
        """Places where micro-batches of one step were given different tensors."""

    def note(self, step: int, tensors: Mapping[int, torch.Tensor]) -> None:
        """Note the inputs of one micro-batch of a step."""
        self.num_steps += step != self._latest_step
        self._latest_step = step
        for place, tensor in tensors.items():
            storages = storages_of([tensor])
            address = tensor.data_ptr() if storages else 0
            before = self._seen.get(place)
            if before is not None and storages and (before.storages, before.address) == (storages, address):
                before.latest = step
                continue
            if before is not None and before.latest == step:
                self._differing.add(place)
            self._seen[place] = _Seen(storages, address, step, step)

    def is_in(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any input was in memory of these tensors when it was seen last."""
        storages = storages_of(tensors)
        return any(not storages.isdisjoint(seen.storages) for seen in self._seen.values())

    def separate(self, places: Iterable[int]) -> None:
        """Treat these inputs as different for each micro-batch from now on."""
        self._differing.update(places)

    def shared_inputs(self, besides: Collection[int] = ()) -> SharedInputs:
        """Return the shared inputs, without those at the places `besides`."""
        apart = self._differing.union(besides)
        shared = {place: seen for place, seen in self._seen.items() if place not in apart}
        stable = (place for place, seen in shared.items() if seen.latest - seen.since >= FEWEST_STEPS - 1)
        return SharedInputs(shared=frozenset(shared), stable=frozenset(stable))
