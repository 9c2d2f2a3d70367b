"""Every test here compiles anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Let no test see what another one compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
