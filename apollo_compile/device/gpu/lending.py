"""Decide whether a backward lends its gradients.

Lent gradients stay in the memory of the CUDA graph, which a replay overwrites. So the caller must have released them
by then, as training does. Where it holds one (gradients are accumulated, or collected), they are copied out from then
on. That may have been a single step, such as a look at gradients; so after a number of copied runs it is asked whether
the last gradients were released, and if so they are lent again. The number doubles every time that was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_compile.torch_bridge.storages import are_gone, storages_of

FIRST_PATIENCE = 8
"""Copied runs after the first refusal, before lending is tried again."""


class Lending:
    """The decision for one backward; `may_lend` is False for a graph whose gradients are always copied out."""

    def __init__(self, *, may_lend: bool) -> None:
        self.is_on = may_lend
        """Whether the next capture lends."""
        self._may_lend = may_lend
        self._patience = FIRST_PATIENCE
        self._copied = 0
        self._last: frozenset[StorageWeakRef] = frozenset()
        """Storages of the gradients of a run that are watched until the next one."""

    def forbid(self) -> None:
        """Always copy out: somebody else reads gradients in an order that a replay does not wait for."""
        self.is_on = self._may_lend = False

    def refuse(self) -> None:
        """Copy out from now on: the caller holds a gradient."""
        self.is_on = False
        self._wait()

    def note(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Count a run whose gradients were copied out; watch those of the last run of the wait."""
        if not self._may_lend or self.is_on:
            return
        self._copied += 1
        if self._copied == self._patience:
            self._last = storages_of(each for each in gradients if each is not None)

    def resumes(self) -> bool:
        """Return whether to lend again, before a run: the watched gradients were released."""
        if not self._last:
            return False
        last, self._last = self._last, frozenset()
        if not are_gone(last):
            self._wait()
            return False
        self.is_on = True
        return True

    def _wait(self) -> None:
        if self._copied:
            self._patience *= 2
        self._copied = 0
