"""A captured CUDA graph with the addresses that it uses, and the copies around each replay.

    Captured.can_replay(inputs), Captured.replay(gpu, inputs) -> outputs
    slot_for(tensor)        what an input is copied to
    find_copied(outputs)    what is copied out

`execute.py` decides what is used in place, copied, lent and saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from apollo_compile.device.gpu.gpu import Gpu, Recording
from apollo_compile.device.gpu.quota import LaneMemory
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.storages import count_uses


@dataclass(eq=False, slots=True)
class Captured:
    """A CUDA graph with the addresses that it uses."""

    recording: Recording
    addresses: dict[int, int]
    """Addresses of the inputs in place, by position."""
    slots: dict[int, torch.Tensor]
    """Tensors that the other inputs are copied to, by position."""
    outputs: list[torch.Tensor | None]
    saved: frozenset[int]
    """Storage addresses of outputs that are saved for backward."""
    baseline_refcounts: dict[int, int]
    """Baseline reference count per storage of saved and lent outputs, by handle: without any user."""
    in_place_storages: frozenset[int]
    """Storage addresses of the inputs in place."""
    copied: tuple[Copied, ...]
    """Copies to make after a replay."""
    copied_outputs: frozenset[int]
    """Positions of outputs that are copied out; the same tensor may also be saved, as another output."""
    memory: tuple[LaneMemory, ...]

    def reads(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a replay would read these inputs: those in place have unchanged addresses."""
        return [inputs[index].data_ptr() for index in self.addresses] == list(self.addresses.values())

    def can_replay(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a replay would read these inputs and overwrite nothing that is still in use."""
        return self.reads(inputs) and count_uses(self.baseline_refcounts) == list(self.baseline_refcounts.values())

    def replay(self, gpu: Gpu, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Replay on the caller's stream, and return the outputs: views, and copies of those that are copied out."""
        gpu.copy(list(self.slots.values()), [inputs[index] for index in self.slots])
        self.recording.replay()
        copies = [slot_for(each.source) for each in self.copied]
        gpu.copy(copies, [each.source for each in self.copied])
        # A tensor that is returned twice must stay one object: else autograd gives one gradient to two parameters.
        views = {
            id(out): out.detach() for out in self.outputs if out is not None
        }  # new objects, so that their references can be counted
        copied = {
            id(output): _in_copy(output, each, copy)
            for each, copy in zip(self.copied, copies, strict=True)
            for output in each.outputs
        }
        return [
            None if out is None else copied[id(out)] if index in self.copied_outputs else views[id(out)]
            for index, out in enumerate(self.outputs)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Outputs that share a storage, and the part of it that is copied for them."""

    source: torch.Tensor
    """The output itself if it is the only one; else the range of bytes that contains all of them."""
    outputs: tuple[torch.Tensor, ...]


def find_copied(outputs: Iterable[torch.Tensor]) -> tuple[Copied, ...]:
    """Return what to copy for these outputs: once per storage."""
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


def _in_copy(output: torch.Tensor, copied: Copied, copy: torch.Tensor) -> torch.Tensor:
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


def slot_for(tensor: torch.Tensor) -> torch.Tensor:
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
