"""Slots: memory of their own for gradients that live on while the next forward runs.

    Slots               those of one model
    GradientSlots       those of one CUDA graph
    fill_slots(...)     copies what a segment made to its slots

A gradient is copied to its slot inside the CUDA graph, by the lane of the segment that made it, right behind it. Later
segments read it there, too, so the memory that it was made in is used again within the same backward. The caller gets
views of the slots: nothing is allocated or copied outside of the CUDA graph.

A replay overwrites its slots, so nobody may use them when the backward begins; references are counted. Where zero_grad
comes between forward and backward, that is so in every step. Where gradients are accumulated there are no slots: one
CUDA graph serves the first gradients, which are copied out, and those that are added to them, which are lent
(`lending.py`). A forward cannot have two, one with slots and one that lends: the first that is captured takes over the
memory that the forward saved to, so that the other might write there before it reads.

CUDA graphs of one model share the slots of equal layouts. A slot ends with the last CUDA graph that has it, and with
the last view of it that the caller holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from apollo_compile.device.gpu.copies import find_copied, target_for
from apollo_compile.ir import BufferId, Launch, Program
from apollo_compile.torch_bridge.storages import count_uses, storage_handles

if TYPE_CHECKING:
    from apollo_compile.device.gpu.gpu import Gpu, Stream


class Slot:
    """Memory for one gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take a tensor that nobody else has."""
        self.tensor = tensor
        (self.handle,) = storage_handles([tensor])
        (self.baseline,) = count_uses([self.handle])
        """Reference count of the storage without any user."""


class Slots:
    """The slots of one model, which the CUDA graphs that use them keep alive."""

    def __init__(self) -> None:
        self._by_layout: weakref.WeakValueDictionary[object, Slot] = weakref.WeakValueDictionary()

    def find(self, position: int, like: torch.Tensor) -> Slot:
        """Return the slot for the output at that position, with the layout of `like`.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        layout = position, tuple(like.shape), like.stride(), like.dtype, like.device
        slot = self._by_layout.get(layout)
        if slot is None:
            self._by_layout[layout] = slot = Slot(target_for(like))
        return slot


class GradientSlots:
    """The slots that one CUDA graph writes to; none before `make`."""

    def __init__(self) -> None:
        self.tensors: dict[BufferId, torch.Tensor] = {}
        """What outputs of the graph are copied to."""
        self._slots: list[Slot] = []
        self._handles: list[int] = []
        self._baseline: list[int] = []

    def make(self, program: Program, outputs: Sequence[torch.Tensor | None], slots: Slots, gpu: Gpu) -> None:
        """Take slots for outputs like these, and copy to them if nobody uses them, so that this has run once.

        Outputs that share memory with others, and those whose elements do, get none: they keep that when they are
        copied out.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        self.clear()
        positions: dict[int, int] = {}
        for position, output in enumerate(outputs):
            if output is not None and program.outputs[position] not in program.inputs:
                positions.setdefault(id(output), position)
        found = find_copied(output for output in outputs if output is not None and id(output) in positions)
        alone = [each.source for each in found if each.source is each.outputs[0]]
        for gradient in alone:
            position = positions[id(gradient)]
            slot, buffer = slots.find(position, gradient), program.outputs[position]
            assert buffer is not None, "an output that is a tensor is a buffer"
            self._slots.append(slot)
            self.tensors[buffer] = slot.tensor
        self._handles = [slot.handle for slot in self._slots]
        self._baseline = [slot.baseline for slot in self._slots]
        if self.are_free():
            gpu.copy(list(self.tensors.values()), alone)

    def are_free(self) -> bool:
        """Whether nobody uses what is in them."""
        return count_uses(self._handles) == self._baseline

    def clear(self) -> None:
        """Forget all slots."""
        self.tensors, self._slots, self._handles, self._baseline = {}, [], [], []


def fill_slots(
    launch: Launch,
    values: dict[BufferId, torch.Tensor],
    slots: Mapping[BufferId, torch.Tensor],
    gpu: Gpu,
    stream: Stream,
) -> None:
    """Copy what was launched on `stream` to its slots, and let later readers find it there."""
    filled = [buffer for buffer in launch.outputs if buffer in slots]
    if filled:
        gpu.call(_copy, [*(slots[buffer] for buffer in filled), *(values[buffer] for buffer in filled)], stream)
        values.update((buffer, slots[buffer]) for buffer in filled)


def _copy(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy the second half of the tensors to the first half."""
    half = len(tensors) // 2
    torch._foreach_copy_(tensors[:half], tensors[half:])
    tensors.clear()
    return ()
