"""Storages of tensors: their identity and their reference counts.

Nothing here keeps a storage alive.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Identity(StorageWeakRef):
    """Refers to a storage once: torch's class counts a copy of itself as none, and releases the storage again."""

    __slots__ = ()

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)  # type: ignore[no-untyped-call]

    def __copy__(self) -> _Identity:
        return self

    def __deepcopy__(self, memo: object) -> _Identity:
        return self

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle the identity of a storage: it means nothing in another process")


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[StorageWeakRef]:
    """Return the identities of the storages of tensors; sparse and uninitialized tensors have none.

    The result does not refer to the tensors, not even weakly: torch refuses to swap a tensor that is referred to, which
    `Module.to` may do. It does not keep the storages alive either, only their ids.
    """
    found = set()
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, ValueError):
            found.add(_Identity(tensor.untyped_storage()))
    return frozenset(found)


def describe_sharing(values: Sequence[object]) -> str:
    """Return which tensors share memory, and where in it they begin, as a deterministic text; empty where none do.

    AOTAutograd traces such inputs as views of one tensor if one of them is written to, and its cache has no key for
    that.
    """
    groups: dict[StorageWeakRef, list[str]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for storage in storages_of([value]):
                place = f"{position} from {value.storage_offset()} of {value.untyped_storage().nbytes()}"
                groups.setdefault(storage, []).append(place)
    return "; ".join(", ".join(group) for group in groups.values() if len(group) > 1)


def storage_handles(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the handle of the storage of each tensor for `count_uses`, valid while the tensor lives."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def count_uses(handles: Iterable[int]) -> list[int]:
    """Return the reference count of each storage."""
    return list(map(torch._C._storage_Use_Count, handles))


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the address of each tensor.

    This is the quickest way, and is compared before every step: `torch._C._tensors_data_ptrs_at_indices_equal` takes
    twice as long.
    """
    return list(map(torch.Tensor.data_ptr, tensors))


class Places:
    """Addresses that tensors at some positions of a list should have."""

    def __init__(self, addresses: Mapping[int, int]) -> None:
        """Take addresses by position."""
        self._positions, self._addresses = list(addresses), list(addresses.values())

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors have these addresses."""
        return addresses_of([tensors[position] for position in self._positions]) == self._addresses


class WrittenMemory:
    """Memory of tensors that are written to, and whether others are in it; cheap to ask again while nothing moves.

    Arguments:
        written: positions of the tensors that are written to, in the lists that `is_shared` gets.
    """

    def __init__(self, written: Collection[int]) -> None:
        self._written = frozenset(written)
        self._addresses: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        """Byte ranges that are written to, sorted."""
        self._is_shared = False

    def is_shared(self, tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> bool:
        """Return whether a tensor that is written to shares memory with another one.

        Arguments:
            tensors: those that are written to, at their positions, and more that mostly stay where they are.
            others: more tensors, other ones in every call.
        """
        if not self._written:
            return False
        try:
            addresses = addresses_of(tensors)
        except (NotImplementedError, RuntimeError):  # one has no storage
            addresses = list(map(_address_of, tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            ranges = (_range_of(tensors[place]) for place in self._written)
            self._ranges = sorted(each for each in ranges if each[0] < each[1])
            self._is_shared = self._find_overlap(tensors)
        return self._is_shared or any(self._has(*_range_of(other)) for other in others)

    def _find_overlap(self, tensors: Sequence[torch.Tensor]) -> bool:
        end = end_of_written = 0
        ranges = sorted((*_range_of(tensor), place in self._written) for place, tensor in enumerate(tensors))
        for first, last, is_written in ranges:
            if first == last:
                continue
            if first < (end if is_written else end_of_written):
                return True
            end = max(end, last)
            end_of_written = max(end_of_written, last) if is_written else end_of_written
        return False

    def _has(self, first: int, last: int) -> bool:
        """Whether bytes from `first` to before `last` are written to; what is written to does not overlap."""
        if first == last:
            return False
        place = bisect.bisect_left(self._ranges, (last, 0)) - 1
        return place >= 0 and self._ranges[place][1] > first


def _address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # it has no storage
        return 0


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and that behind its last; equal where it has none."""
    first = _address_of(tensor)
    if not first or not tensor.numel():
        return first, first
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + span * tensor.element_size()
