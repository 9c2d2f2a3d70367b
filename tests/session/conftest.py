"""Fixtures of tests that compile models: those of the end-to-end tests, a cache for one test, and no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters

from apollo_compile.session.step import segments
from tests.end_to_end.conftest import _as_the_results_say, deterministic
from tests.session.trained import interpret_plainly

__all__ = ["_as_the_results_say", "deterministic", "interpreted", "own_cache"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile, and all our compiles, interpret."""
    interpret_plainly(monkeypatch)


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[None]:
    """Let AOTAutograd keep what this test compiles, for this test only; Inductor's code is shared as ever."""
    with functorch_config.patch(enable_autograd_cache=True), torch.compiler.config.patch(cache_key_tag=str(tmp_path)):
        counters.clear()
        yield


@pytest.fixture(autouse=True)
def _update_modules_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps update each of the small modules of tests by itself, as they do with large ones."""
    monkeypatch.setattr(segments, "FEWEST_BYTES", 0)
