"""Tests that need a GPU; where there is none they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and skip what is in this directory.

    Warnings are none of its errors: torch has some that depend on the device, such as that TF32 is not turned on.
    """
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))
