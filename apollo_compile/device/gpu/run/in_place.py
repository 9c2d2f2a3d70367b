"""The inputs of a program that a capture uses in place.

InPlace.find(inputs) -> their positions;  InPlace.forward_of(inputs) -> Captured | None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from apollo_compile.device.gpu.run.captured import Captured
from apollo_compile.device.gpu.run.copies import storage_address
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.ir import Role, Variant
from apollo_compile.target.target import Contract


class InPlace:
    """The choice of inputs in place for one program."""

    def __init__(self, contract: Contract, role: Role, variant: Variant | None, shared: ModelMemory) -> None:
        self._contract = contract
        self._role = role
        self._variant = variant
        self._shared = shared
        self._stable = contract.stable_inputs
        """Stable inputs that have not moved yet."""

    def drop_moved(self, inputs: Sequence[torch.Tensor], known: Mapping[int, int]) -> bool:
        """Copy in from now on the stable inputs that have moved, and return whether there are any.

        Arguments:
            inputs: of a run.
            known: addresses of the last capture, by position.
        """
        moved = {
            index for index in self._stable if known.get(index, inputs[index].data_ptr()) != inputs[index].data_ptr()
        }
        self._stable -= moved
        return bool(moved)

    def find(self, inputs: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """Return the positions of inputs that a capture can use in place; None if this run must not be captured.

        A backward is captured after a replayed forward; inputs that the forward's CUDA graph did not save are copied.
        A forward whose saved outputs no capture can own any more is released, and captured again.
        """
        in_place = self._contract.static_inputs
        if self._role is Role.BACKWARD:
            forward = self.forward_of(inputs)
            if forward is None:
                return None
            if forward.owners is None:
                if not any(reader.is_live for reader in forward.readers):
                    self._shared.drop(forward)  # another capture would overwrite its saved outputs
                return None
            stable = forward.saved | forward.in_place_storages
            in_place = frozenset(index for index in in_place if storage_address(inputs[index]) in stable)
        return in_place | self._stable | (self._contract.written_inputs or frozenset())

    def forward_of(self, inputs: Sequence[torch.Tensor]) -> Captured | None:
        """Return the captured forward that was replayed last, if it saved these inputs of a backward."""
        forward = self._shared.contents
        if self._role is not Role.BACKWARD or forward is None or forward.variant != self._variant:
            return None
        return forward if forward.saved <= {storage_address(tensor) for tensor in inputs} else None
