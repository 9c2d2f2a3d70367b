"""A real browser, for pages and for traces: a plugin of pytest, since directories beside each other need it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_MS = 300_000
"""After which a browser hangs; on a busy machine it takes a minute to start."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, which finds no other machine than this one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine: install the package 'chromium'")
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", alone], timeout=PATIENCE_MS
        )
        yield found
        found.close()
