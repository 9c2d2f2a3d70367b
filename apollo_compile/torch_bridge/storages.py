"""Storages of tensors: their identity and their reference counts.

    storages_of(tensors)        identities of storages, to compare
    storage_handles(tensors)    handles of storages for `count_uses`
    count_uses(handles)         reference count of each storage
    are_gone(storages)          whether no storage lives any more
    are_at(tensors, addresses)  whether tensors are at these addresses

Nothing here keeps a storage alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

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


def are_at(tensors: list[torch.Tensor], addresses: Mapping[int, int]) -> bool:
    """Return whether the tensors at these positions have these addresses."""
    if _are_addresses_equal is None:
        return [tensors[index].data_ptr() for index in addresses] == list(addresses.values())
    return _are_addresses_equal(tensors, list(addresses.values()), list(addresses))


_are_addresses_equal: Callable[[list[torch.Tensor], list[int], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None
)
"""One native call; None where torch is built without CUDA."""
