"""The stand-in that most of these tests run on."""

from __future__ import annotations

import pytest

from tests.device.gpu.fake_gpu import FakeGpu


@pytest.fixture
def gpu() -> FakeGpu:
    """Make a device of two units."""
    return FakeGpu(units=2)
