"""Every fault that is injected is counted in docs/robustness.md, called by its test's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.test_table import NO_FAULTS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of this folder that inject one."""
    for item in items:
        name = item.name.partition("[")[0]
        if HERE in item.path.parents and item.path.name != "test_table.py" and name not in NO_FAULTS:
            item.add_marker(pytest.mark.robustness("Faults", name.removeprefix("test_").replace("_", " ")))
