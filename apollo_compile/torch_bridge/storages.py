"""The memory behind tensors: whether it is the same, and how many tensors refer to it.

    storages_of(tensors)        identities of memory, to compare
    storage_handles(tensors)    what `count_uses` knows memory by
    count_uses(handles)         number of tensors that refer to each

Nothing here keeps memory alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[StorageWeakRef]:
    """Return the storages of tensors, to tell whether it is the same ones; sparse and uninitialized tensors have none.

    Nothing refers to the tensors, not even weakly, since torch swaps no tensor that is referred to: `Module.to` may
    want to. Nor is their memory kept, only its number.
    """
    found = set()
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, ValueError):
            found.add(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
    return frozenset(found)


def storage_handles(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return what `count_uses` knows the memory of each tensor by, for as long as the tensor lives."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def count_uses(handles: Iterable[int]) -> list[int]:
    """Return for each memory how many tensors refer to it."""
    return list(map(torch._C._storage_Use_Count, handles))
