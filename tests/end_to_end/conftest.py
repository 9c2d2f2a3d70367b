"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from apollo_compile import backend
from benchmarks.sweep import make_options


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


@pytest.fixture(autouse=True)
def _how_graphs_ran(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Start without what Dynamo compiled for others, and note for docs/robustness.md who ran the test's graphs."""
    torch._dynamo.reset()
    if request.node.get_closest_marker("robustness") is None:
        yield
        return
    torch.manual_seed(0)
    before = backend.compiled_models()
    yield
    models = [model for model in backend.compiled_models() if model not in before]
    graphs = [graph for model in models for graph in model.graphs if graph.has_run]
    record_property("segments", sum(bool(graph.trace().spans) for graph in graphs))
    record_property("lanes", sum(len({span.lane for span in graph.trace().spans}) > 1 for graph in graphs))
    record_property("reasons", sorted({reason for model in models for _, reason in model.handed_over}))
