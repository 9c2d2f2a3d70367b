"""Models of these tests are small: each of their modules is updated by itself, as those of large models are."""

from __future__ import annotations

import pytest

from apollo_compile.session.step import segments


@pytest.fixture(autouse=True)
def _update_modules_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "FEWEST_BYTES", 0)
