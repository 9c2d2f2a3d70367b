"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from apollo_compile.planner.solve import WORK_SHARE, Effort
from benchmarks.robustness import TESTS
from benchmarks.sweep import make_options
from tests.conftest import HowGraphsRan, name_of_line
from tests.torch_settings import changed


@pytest.fixture(scope="session")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of torch.compile with which small models run on lanes, and with which every defect is raised.

    Segments are large, because each takes a C++ compile.
    """
    options = make_options(tmp_path_factory.mktemp("profile") / "profile.json")
    return {"backend": "apollo", "options": {**options, "partition.min_segment_share": 0.2}}


@pytest.fixture(scope="session")
def uncompiled(lanes: dict[str, Any]) -> dict[str, Any]:
    """The same without a compiler, which takes most of the time, for what the traced graph and the plan decide."""
    return {**lanes, "options": {**lanes["options"], "runtime.bodies": "eager"}}


@pytest.fixture(scope="session", params=["eager", pytest.param("native", marks=pytest.mark.soak)])
def either(request: pytest.FixtureRequest, lanes: dict[str, Any]) -> dict[str, Any]:
    """The same both ways, the one without a compiler in every run: for what should hold whatever runs in a segment."""
    return {**lanes, "options": {**lanes["options"], "runtime.bodies": request.param}}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Ask torch for the same numbers every time."""
    with changed(torch.use_deterministic_algorithms, True, False):
        yield


@pytest.fixture(autouse=True)
def _plans_do_not_depend_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the amount of work end each search for a plan, since other tests take the cores for a while."""

    def without_hurry(*, time_limit_s: float, **settings: Any) -> Effort:
        settings["work_s"] = WORK_SHARE * time_limit_s
        return Effort(time_limit_s=10 * time_limit_s, **settings)

    monkeypatch.setattr("apollo_compile.passes.plan.Effort", without_hurry)


@pytest.fixture(autouse=True)
def _as_the_results_say(request: pytest.FixtureRequest, how_graphs_ran: HowGraphsRan | None) -> Iterator[None]:
    """Start from one seed, without what Dynamo compiled for others; what the results have in segments still must be.

    Results would be eager's as well if every graph went to Inductor.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    if how_graphs_ran is None:
        return
    line = _lines().get(name_of_line(request.node), {})
    found = how_graphs_ran.properties
    for name in ("segments", "lanes") if torch.get_num_threads() > 1 else ("segments",):
        if line.get(name) and not found.get(name):
            pytest.fail(f"the results have {line[name]} of its graphs in {name}, now there are none: {found}")


@functools.cache
def _lines() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(TESTS.read_text(encoding="utf-8"))
    return content
