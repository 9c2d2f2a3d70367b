"""Tests that need a GPU; where there is none they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and skip what is in this directory."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))
