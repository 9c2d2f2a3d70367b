"""Fixtures that all tests share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `pytest --hypothesis-profile soak` draws many more examples, other ones every time.
_ANY_TIME = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("soak", max_examples=2000, print_blob=True, **_ANY_TIME)
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_ANY_TIME)
settings.load_profile("default")

EXPECTED = Path(__file__).parent / "expected"


@pytest.fixture
def expect() -> Callable[[str, str], None]:
    """Compare a text with `tests/expected/{name}.txt`; `APOLLO_ACCEPT=1 pytest` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path, got = EXPECTED / f"{name}.txt", text.rstrip("\n") + "\n"
        if os.environ.get("APOLLO_ACCEPT") == "1":
            path.write_text(got, encoding="utf-8")
        wanted = path.read_text(encoding="utf-8") if path.exists() else ""
        if got != wanted:
            lines = difflib.unified_diff(wanted.splitlines(), got.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join([*lines, "APOLLO_ACCEPT=1 accepts the new text"]), pytrace=False)

    return compare
