"""Lanes for the tests of the native runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from apollo_compile import _native


@pytest.fixture
def lanes() -> Iterator[_native.Lanes]:
    """Make the caller lane and two threads, on two cores where there are two."""
    cores = _native.available_cores()
    lanes = _native.Lanes([[], [cores[0]], [cores[-1]]])
    yield lanes
    lanes.close()
