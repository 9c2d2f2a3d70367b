"""A rank takes the plan of another, and keeps its own where that cannot be; both ranks are in this process."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apollo_compile import backend
from apollo_compile.compiled_graph import OBSERVED_RUNS, SKIPPED_RUNS
from apollo_compile.device import default_profile, save_profile
from apollo_compile.execute import available_units
from apollo_compile.ir import Plan
from apollo_compile.ranks import Ranks, Store
from tests.end_to_end.models import NEVER_AS_LONG_NS, STRICT, TwoTowers, two_tower_inputs

QUICK = {**STRICT, "plan.planner": "greedy", "plan.time_limit_s": 0.1}


class Meddler:
    """A store in which somebody has written something else."""

    def __init__(self, text: str) -> None:
        self._text = text

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._text.encode() if "/plan " in key else desired.encode()


def compile_as_rank(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, launch_ns: int
) -> list[tuple[Plan, Plan]]:
    """Train two towers as a rank that believes in `launch_ns`; return its first and last plan of every graph."""
    torch._dynamo.reset()
    ranks = Ranks(store)
    monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
    file = folder / f"{launch_ns}.json"
    save_profile(dataclasses.replace(default_profile(available_units()), name="wrong", launch_ns=launch_ns), file)
    torch.manual_seed(0)
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options={**QUICK, "device.profile": file})
    first: list[Plan] = []
    for _ in range(2 * (SKIPPED_RUNS + OBSERVED_RUNS)):
        run(*inputs).square().mean().backward()
        (entry,) = backend.find_models(model)
        first = first or [graph.compilation.plan for graph in entry.graphs]
    model.zero_grad()
    run(*inputs).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*inputs).square().mean().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()], rtol=1e-3, atol=1e-5)
    return list(zip(first, (graph.compilation.plan for graph in entry.graphs), strict=True))


def test_a_rank_that_believes_something_else_runs_the_plan_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, and when measured times have replaced what either of them believed."""
    store = dist.HashStore()
    first = compile_as_rank(store, tmp_path, monkeypatch, launch_ns=NEVER_AS_LONG_NS)
    second = compile_as_rank(store, tmp_path, monkeypatch, launch_ns=10 * NEVER_AS_LONG_NS)
    assert first == second
    for before, after in first:
        assert before.makespan_ns > NEVER_AS_LONG_NS > after.makespan_ns
    alone = compile_as_rank(dist.HashStore(), tmp_path, monkeypatch, launch_ns=10 * NEVER_AS_LONG_NS)
    assert [plan.makespan_ns for plan, _ in alone] != [plan.makespan_ns for plan, _ in second]


@pytest.mark.parametrize("text", ["{", '{"costs": {"modes": [], "handover_ns": 0}, "plan": null}'])
def test_what_is_no_plan_for_these_segments_is_not_taken(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each; the rank trains on by its own."""
    with caplog.at_level(logging.WARNING, logger="apollo_compile"):
        plans = compile_as_rank(Meddler(text), tmp_path, monkeypatch, launch_ns=NEVER_AS_LONG_NS)
    assert len(plans) == 2
    assert "does not take the plan of another rank" in caplog.text
