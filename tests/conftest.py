"""Fixtures that all tests share, and the results that docs/robustness.md is made from.

A test with the marker `robustness(section, subject)` is a line of that page: `pytest --robustness FILE` writes what
came of each into `FILE`, beside what earlier runs wrote there.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# `pytest --hypothesis-profile soak` draws many more examples, other ones every time.
_ANY_TIME = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("soak", max_examples=2000, print_blob=True, **_ANY_TIME)
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_ANY_TIME)
settings.load_profile("default")

# Graphs are many small objects: by Python's own thresholds, looking for cycles takes a twentieth of the tests' time.
gc.set_threshold(100_000, 50, 100)

EXPECTED = Path(__file__).parent / "expected"


_cache_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plan every test for the same device, and let it find nothing that others left behind.

    Left to itself, a process measures the machine, on which other tests run meanwhile, and recalls earlier contests
    from the user's cache. Compiled graphs of earlier tests would do as well: whatever a test replaces in planning or
    compiling would not be asked.
    """
    for variable in [name for name in os.environ if name.startswith("APOLLO_") and name != "APOLLO_ACCEPT"]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("APOLLO_PROFILE", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache{next(_cache_numbers)}"))
    if "torch" not in sys.modules:
        yield
        return
    with importlib.import_module("torch._functorch.config").patch(enable_autograd_cache=False):
        yield


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the file for the lines of docs/robustness.md."""
    parser.addoption("--robustness", type=Path, metavar="FILE", help="write results of marked tests there, as JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep what came of a marked test; a failure in any of its phases, or with any of its parameters, is a failure."""
    report: Any = yield
    marker, file = item.get_closest_marker("robustness"), item.config.getoption("--robustness")
    if marker is not None and file is not None:
        section, subject = marker.args
        lines = item.config.stash.setdefault(_LINES, {})
        function = item.nodeid.partition("[")[0]
        line = lines.setdefault(function, {"section": section, "subject": subject, "outcome": "passed"})
        line["says"] = (item.obj.__doc__ or "").strip().splitlines()[0]
        line |= dict(item.user_properties)
        if report.outcome != "passed" and line["outcome"] != "failed":
            line["outcome"] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the lines; tests that did not run keep those they had."""
    lines = session.config.stash.get(_LINES, {})
    if lines:
        file: Path = session.config.getoption("--robustness")
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, **lines}, indent=1) + "\n", encoding="utf-8")


_LINES: pytest.StashKey[dict[str, dict[str, Any]]] = pytest.StashKey()
