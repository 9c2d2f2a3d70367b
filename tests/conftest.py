"""Fixtures that all tests share, and the results that docs/robustness.md counts.

A test with the marker `robustness(section, subject)` is counted there: `pytest --robustness FILE` writes a line for
each into `FILE`, beside what earlier runs wrote there; with `robustness(..., says=...)`, one for each set of
parameters. A line says

    segments, lanes   how many graphs were compiled in segments, and how many of these for several lanes; of a test with
                      parameters, the fewest. Neither is there where nothing was compiled in the test's own process.
    reasons           why something ran another way than planned: fallbacks to Inductor, and warnings
    variants          of a case of training steps, how many steps each variant took
    commit            what it was run with

All of that but the variants is read from the log of the package.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.browser"]

# `pytest --hypothesis-profile soak` draws many more examples, other ones every time.
_ANY_TIME = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("soak", max_examples=2000, print_blob=True, **_ANY_TIME)
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_ANY_TIME)
settings.load_profile("default")

# Graphs are many small objects: by Python's own thresholds, looking for cycles takes a twentieth of the tests' time.
gc.set_threshold(100_000, 50, 100)
# Inductor else tries each kind of vector instructions in each process: it compiles a library and loads it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

EXPECTED = Path(__file__).parent / "expected"

_cache_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plan every test for the same device, and let it find nothing that others left behind.

    Left to itself, a process measures the machine, on which other tests run meanwhile, and recalls earlier comparisons
    from the user's cache. Compiled graphs of earlier tests would do as well: whatever a test replaces in planning or
    compiling would not be asked.
    """
    for variable in [name for name in os.environ if name.startswith("APOLLO_") and name != "APOLLO_ACCEPT"]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("APOLLO_PROFILE", "cpu")
    monkeypatch.setattr(logging.getLogger("apollo_compile.progress"), "level", logging.WARNING)  # how long: no matter
    logging.getLogger("apollo_compile").setLevel(logging.NOTSET)  # an option of an earlier test may have set it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache{next(_cache_numbers)}"))
    if "torch" not in sys.modules:
        yield
        return
    if "torch._inductor.codecache" in sys.modules:  # for a log that nobody reads, it hashes every setting once more
        pickler = sys.modules["torch._inductor.codecache"].FxGraphCachePickler
        monkeypatch.setattr(pickler, "debug_lines", lambda pickler, details: [])
    with importlib.import_module("torch._functorch.config").patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def info_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Take lines of the package from level INFO on, which `caplog` has of marked tests alone, and in part."""
    caplog.set_level(logging.INFO, logger="apollo_compile")
    return caplog


def pytest_collection_finish() -> None:
    """Keep pytest from listening to torch's trace: it listens to loggers that hand nothing on to others.

    As long as anybody listens to that one, torch prints every graph for it and notes the time of every stage.
    """
    logging.getLogger("torch.__trace").propagate = True
    if "torch" in sys.modules:  # else eager's numbers may be inaccurate, too
        importlib.import_module("apollo_compile.torch_bridge.upstream_bugs.vector_functions").choose_vector_kernels()


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


@dataclass
class HowGraphsRan(logging.Handler):
    """What the log says about the graphs of a test."""

    lanes: list[int] = field(default_factory=list)
    """Of every graph that was compiled in segments, for how many lanes."""
    reasons: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(logging.INFO)

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log."""
        text = record.getMessage()
        if (compiled := re.search(r": (?:compiled|loaded) \d+ segments .* onto (\d+) lanes?:", text)) is not None:
            self.lanes.append(int(compiled[1]))
        elif record.levelno >= logging.WARNING or _HOW_ELSE.search(text):
            self._add_reason(text)

    def _add_reason(self, text: str) -> None:
        """Take a reason, without the name of the graph, and without folders, which differ between runs."""
        line = re.sub(
            r"^.+? falls back to (?:torch.compile|Inductor): |^the step stays (?=a loop)", "", text.splitlines()[0]
        )
        self.reasons.add(re.sub(r"(/[\w.+-]+)+/(?=[\w.+-])", "", line)[:240])

    @property
    def properties(self) -> dict[str, Any]:
        """What a line of the results says of it."""
        found: dict[str, Any] = {"reasons": sorted(self.reasons)} if self.reasons else {}
        if self.lanes or self.reasons:
            found |= {"segments": len(self.lanes), "lanes": sum(count > 1 for count in self.lanes)}
        return found


@pytest.fixture(autouse=True)
def how_graphs_ran(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[HowGraphsRan | None]:
    """Read from the log how the graphs of a marked test ran."""
    if request.node.get_closest_marker("robustness") is None:
        yield None
        return
    seen = HowGraphsRan()
    package, session = logging.getLogger("apollo_compile"), logging.getLogger("apollo_compile.session")
    level = session.level
    session.setLevel(logging.INFO)  # compiles and fallbacks are told at this level
    package.addHandler(seen)
    try:
        yield seen
    finally:
        package.removeHandler(seen)
        session.setLevel(level)
    for name, value in seen.properties.items():
        record_property(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the file for the results of marked tests."""
    parser.addoption("--robustness", type=Path, metavar="FILE", help="write results of marked tests there, as JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep what came of a marked test; a failure in any of its phases, or with any of its parameters, is a failure."""
    report: Any = yield
    marker, file = item.get_closest_marker("robustness"), item.config.getoption("--robustness")
    if marker is not None and file is not None:
        section, subject = marker.args
        lines = item.config.stash.setdefault(_LINES, {})
        line = lines.setdefault(name_of_line(item), {"section": section, "subject": subject, "outcome": "passed"})
        line["says"] = marker.kwargs.get("says") or (item.obj.__doc__ or "").strip().splitlines()[0]
        if report.when == "teardown":  # the fixture above has ended
            _add_run(line, dict(item.user_properties))
        if report.outcome != "passed" and line["outcome"] != "failed":
            line["outcome"] = report.outcome
    return report


def name_of_line(item: pytest.Item) -> str:
    """Return under which name the results have a marked test."""
    marker = item.get_closest_marker("robustness")
    return item.nodeid if marker is not None and "says" in marker.kwargs else item.nodeid.partition("[")[0]


def _add_run(line: dict[str, Any], run: Mapping[str, Any]) -> None:
    """Add what was seen in a run with one set of parameters."""
    for name in ("segments", "lanes"):
        if name in run:
            line[name] = min(run[name], line.get(name, run[name]))
    if "variants" in run:
        line["variants"] = run["variants"]
    if "reasons" in run:
        line["reasons"] = sorted({*line.get("reasons", ()), *run["reasons"]})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the lines; tests that did not run keep those they had."""
    lines = session.config.stash.get(_LINES, {})
    if lines:
        file: Path = session.config.getoption("--robustness")
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        commit = importlib.import_module("apollo_compile.tools.bench.facts").machine_facts()["commit"]
        for line in lines.values():
            line["commit"] = commit
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, **lines}, indent=1) + "\n", encoding="utf-8")


_HOW_ELSE = re.compile(r" falls back to |^the step stays a loop|^.+: a loop over micro-batches for now: ")
"""What the log says where something runs another way than planned, and nothing is wrong."""

_LINES: pytest.StashKey[dict[str, dict[str, Any]]] = pytest.StashKey()
