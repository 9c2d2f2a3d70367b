"""Storages of tensors: their identity and their reference counts.

    storages_of(tensors)        identities of storages, to compare
    storage_handles(tensors)    handles of storages for `count_uses`
    count_uses(handles)         reference count of each storage
    are_gone(storages)          whether no storage lives any more

Nothing here keeps a storage alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[StorageWeakRef]:
    """Return the identities of the storages of tensors; sparse and uninitialized tensors have none.

    The result does not refer to the tensors, not even weakly: torch refuses to swap a tensor that is referred to, which
    `Module.to` may do. It does not keep the storages alive either, only their ids.
    """
    found = set()
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, ValueError):
            found.add(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
    return frozenset(found)


def storage_handles(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the handle of the storage of each tensor for `count_uses`, valid while the tensor lives."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def count_uses(handles: Iterable[int]) -> list[int]:
    """Return the reference count of each storage."""
    return list(map(torch._C._storage_Use_Count, handles))


def are_gone(storages: Iterable[StorageWeakRef]) -> bool:
    """Return whether none of these storages lives any more."""
    return all(storage.expired() for storage in storages)  # type: ignore[no-untyped-call]
