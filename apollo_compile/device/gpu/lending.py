"""Decide how long gradients of a model live, and thus where its CUDA graphs leave them.

Lent gradients stay in the memory of the CUDA graphs, which the next forward overwrites. So the caller must have
released them when a forward begins, as training does that zeroes them after a step. Where they live on, but are
released when the backward begins (zeroed between forward and backward), they are copied to slots in the CUDA graph
(`slots.py`). Where they live longer, they are copied out; and while such a copy lives, the next gradients are lent,
since autograd adds them to it and lets them go (accumulation). If they are not let go, all are copied out.

What lives longer than was expected is treated so from then on. That may have been a single step, such as a look at
gradients; so after a number of runs it is asked when the last gradients are released, and if that is earlier, it is
expected from then on. The number doubles every time that was wrong.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_compile.ir import Role
from apollo_compile.torch_bridge.storages import are_alive, are_gone, storages_of

FIRST_PATIENCE = 8
"""Runs after the first refusal, before a shorter life is expected again."""

MOST_COPIES = 8
"""Gradients that are looked at to tell whether others are added to them; the memory does not depend on it."""

AreReleased = Callable[[], bool]
"""Tells whether some gradients are released."""


class Lifetime(enum.IntEnum):
    """When gradients are released at the latest."""

    FORWARD = 0
    """When the next forward begins: they are lent."""
    BACKWARD = 1
    """When the next backward begins: they are copied to slots."""
    SUM = 2
    """Later, but for those that are added to others: they are copied out, and those lent."""
    LONGER = 3
    """Later, all of them: they are copied out."""


class Lending:
    """The decision for the backwards of one model."""

    def __init__(self) -> None:
        self.lifetime = Lifetime.FORWARD
        """What the next capture of a backward expects."""
        self._before = Lifetime.FORWARD
        """What was expected before a shorter life was."""
        self._has_tried = False
        """Whether a shorter life was expected after a wait, and not refused since."""
        self._is_forbidden = False
        self._patience = FIRST_PATIENCE
        self._num_runs = 0
        """Backwards since the wait began, but those that lent."""
        self._are_released: AreReleased | None = None
        """Tells of the gradients of the last backward, if it is asked whether they are released."""
        self._have_outlived_forward = False
        """Whether these were in use when a forward began, so that it is asked when a backward begins."""
        self._copies: frozenset[StorageWeakRef] = frozenset()
        """Storages of a few gradients that others may be added to."""

    def forbid(self) -> None:
        """Always copy out: somebody else reads gradients in an order that a replay does not wait for."""
        self.lifetime, self._is_forbidden, self._are_released = Lifetime.LONGER, True, None

    def lends(self) -> bool:
        """Whether a replay lends its gradients."""
        return self.lifetime is Lifetime.FORWARD or (self.lifetime is Lifetime.SUM and self._have_copies())

    def refuse(self, are_released: AreReleased | None = None) -> None:
        """Expect a longer life: the caller holds a gradient when a replay would overwrite it.

        Arguments:
            are_released: where a forward begins, what tells of it when its backward begins.
        """
        self.lifetime = max(self._before, Lifetime(min(self.lifetime + 1, Lifetime.LONGER)))
        self._are_released = are_released if self.lifetime is Lifetime.BACKWARD else None
        self._have_outlived_forward = True
        self._wait()

    def note(self, gradients: Iterable[torch.Tensor | None], are_free: AreReleased | None = None) -> None:
        """Count a backward whose gradients were not lent; watch them while all are lent, or at the end of the wait.

        Arguments:
            gradients: what it returned.
            are_free: tells whether they are released; by default they are when their memory is.
        """
        if self._is_forbidden:
            return
        self._num_runs += 1
        is_watched = self.lifetime is Lifetime.FORWARD or self._num_runs == self._patience
        if are_free is None and (is_watched or self.lifetime is not Lifetime.LONGER):
            given = [each for each in gradients if each is not None]
            if is_watched:
                are_free = functools.partial(are_gone, storages_of(given))
            if not self._have_copies():
                self._copies = storages_of(given[:: 1 + len(given) // MOST_COPIES])
        if is_watched:
            self._are_released, self._have_outlived_forward = are_free, False

    def changes(self, role: Role) -> bool:
        """Return whether CUDA graphs have to be others from now on; asked when a forward or a backward begins."""
        are_released, expected = self._are_released, self.lifetime
        if are_released is None or self._have_outlived_forward is not (role is Role.BACKWARD):
            return False
        if are_released():
            self._find(Lifetime.BACKWARD if role is Role.BACKWARD else Lifetime.FORWARD)
        elif role is Role.BACKWARD:
            self._find(Lifetime.SUM)
        elif expected is Lifetime.FORWARD:
            self.refuse(are_released)
        else:
            self._have_outlived_forward = True
        return (self.lifetime is Lifetime.BACKWARD) is not (expected is Lifetime.BACKWARD)

    def _have_copies(self) -> bool:
        """Whether there are gradients that others may be added to."""
        return bool(self._copies) and are_alive(self._copies)

    def _find(self, found: Lifetime) -> None:
        """Expect what was found, at once; or go on, and wait longer before it is asked again."""
        self._are_released = None
        if found < self.lifetime:
            self._before, self.lifetime = self.lifetime, found
            self._num_runs, self._has_tried = 0, True
        elif found > self.lifetime:
            self.refuse()
        elif self.lifetime is not Lifetime.FORWARD:
            self._wait()

    def _wait(self) -> None:
        if self._has_tried or self._num_runs >= FIRST_PATIENCE:
            self._patience *= 2
        self._num_runs, self._has_tried = 0, False
