"""Tests of tuners: each on a clock of its own."""

from __future__ import annotations

import pytest

from apollo_compile.autotune import tuner


@pytest.fixture(autouse=True)
def _no_other_tuners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide tuners of earlier tests, whose comparisons may not have ended."""
    monkeypatch.setattr(tuner, "_tuners", [])
