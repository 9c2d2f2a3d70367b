"""Waits for transfers between ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apollo_compile.distributed.link import Failures


class LateWork:
    """A transfer whose first wait ends at its limit, just before the transfer does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waits, self._error = 0, error

    def wait(self, *limit: Any) -> bool:
        """Wait once in vain."""
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it is over by now."""
        return True


def test_a_transfer_that_ends_right_after_the_limit_of_a_wait_is_no_error() -> None:
    """Its own end counts: a result, or an error."""
    group: Any = SimpleNamespace(get_group_store=dist.HashStore)
    failures = Failures(group, torch.device("cpu"))
    late: Any = LateWork()
    broken: Any = LateWork(ConnectionError("closed by peer"))
    assert failures.wait(late) and late.waits == 2
    with pytest.raises(ConnectionError, match="closed by peer"):
        failures.wait(broken)
