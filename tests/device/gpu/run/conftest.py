"""The stand-in that most of these tests run on."""

from __future__ import annotations

import pytest
import torch

from tests.device.gpu.fake_gpu import FakeGpu


@pytest.fixture
def gpu() -> FakeGpu:
    """Make a device of two units."""
    return FakeGpu(units=2)


@pytest.fixture
def weight() -> torch.Tensor:
    """Make a parameter."""
    return torch.randn(4)
