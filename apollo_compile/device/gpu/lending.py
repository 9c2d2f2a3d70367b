"""Decide whether a model lends its gradients.

Lent gradients stay in the memory of its CUDA graphs, which the next forward overwrites. So the caller must have
released them when a forward begins, as training does that zeroes them after a step. Where they live on (gradients are
accumulated or collected, or zeroed between forward and backward), they are copied out. That may have been a single
step, such as a look at gradients; so after a number of copied runs it is asked whether the last gradients were
released, and if so they are lent again. The number doubles every time that was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_compile.torch_bridge.storages import are_gone, storages_of

FIRST_PATIENCE = 8
"""Copied runs after the first refusal, before lending is tried again."""


class Lending:
    """The decision for the backwards of one model."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether the next capture of a backward lends."""
        self._is_forbidden = False
        self._patience = FIRST_PATIENCE
        self._copied = 0
        self._watched: frozenset[StorageWeakRef] = frozenset()
        """Storages of the gradients of the last backward, if it is asked whether they are released."""

    def forbid(self) -> None:
        """Always copy out: somebody else reads gradients in an order that a replay does not wait for."""
        self.is_on, self._is_forbidden = False, True

    def refuse(self) -> None:
        """Copy out from now on: the caller holds a gradient when a forward begins."""
        self.is_on = False
        self._wait()

    def note(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Count a backward whose gradients were not lent; watch them while lending is on, or at the end of the wait."""
        if self._is_forbidden:
            return
        self._copied += 1
        if self.is_on or self._copied == self._patience:
            self._watched = storages_of(each for each in gradients if each is not None)

    def changes(self) -> bool:
        """Return whether gradients are treated otherwise from now on; asked when a forward begins."""
        watched, self._watched = self._watched, frozenset()
        if not watched:
            return False
        are_released = are_gone(watched)
        if not are_released:
            was_on = self.is_on
            self.refuse()
            return was_on
        has_changed, self.is_on = not self.is_on, True
        return has_changed

    def _wait(self) -> None:
        if self._copied >= FIRST_PATIENCE:
            self._patience *= 2
        self._copied = 0
