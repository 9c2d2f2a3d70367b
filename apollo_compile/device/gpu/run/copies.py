"""Copies of tensors that keep their layouts, and memory that they share.

    target_for(tensor)      an empty tensor that it can be copied to
    find_copied(outputs)    the sources to copy for outputs, some of which may share memory
    in_copy(output, ...)    the part of a copy that is an output

Nothing here copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from apollo_compile.errors import UnsupportedGraphError


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Outputs that share a storage, and the part of it that is copied for them."""

    source: torch.Tensor
    """The output itself if it is the only one; else the range of bytes that contains all of them."""
    outputs: tuple[torch.Tensor, ...]


def find_copied(outputs: Iterable[torch.Tensor]) -> tuple[Copied, ...]:
    """Return the sources to copy for these outputs: one per storage."""
    by_memory: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for output in outputs:
        by_memory[storage_address(output) or -id(output)][id(output)] = output  # an empty tensor has no storage
    found = []
    for together in by_memory.values():
        first, *others = together.values()
        source = _bytes_of(together.values()) if others or _overlaps_itself(first) else first
        found.append(Copied(source=source, outputs=tuple(together.values())))
    return tuple(found)


def _bytes_of(tensors: Collection[torch.Tensor]) -> torch.Tensor:
    """Return the aligned range of bytes in one storage that contains all the tensors."""
    storage = next(iter(tensors)).untyped_storage()
    begin = min(_first_byte(tensor) for tensor in tensors) // _ALIGNMENT * _ALIGNMENT
    end = max(_first_byte(tensor) + _num_bytes(tensor) for tensor in tensors)
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, begin, (end - begin,), (1,))


_ALIGNMENT = 16
"""Size of the largest element type in bytes."""


def in_copy(output: torch.Tensor, copied: Copied, copy: torch.Tensor) -> torch.Tensor:
    """Return the view of `copy` that corresponds to `output` in the source."""
    if copied.source is output:
        return copy
    offset = (_first_byte(output) - copied.source.storage_offset()) // output.element_size()
    empty = torch.empty(0, dtype=output.dtype, device=output.device)
    return empty.set_(copy.untyped_storage(), offset, output.shape, output.stride())


def _first_byte(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def target_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the layout of `tensor`.

    Raises:
        UnsupportedGraphError: elements of the tensor share memory, so it cannot be a target of a copy.
    """
    if _overlaps_itself(tensor):
        raise UnsupportedGraphError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} cannot be copied for a CUDA "
            "graph: its elements share memory; make it contiguous"
        )
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
