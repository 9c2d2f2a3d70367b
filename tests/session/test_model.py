"""Autotuning between the plan, the serial plan and Inductor, in real training loops."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import apollo_compile
from apollo_compile.device.cpu import execute
from apollo_compile.ir import Variant
from apollo_compile.session import registry
from apollo_compile.session.learner import MAX_REPLANS, OBSERVED_RUNS, SKIPPED_RUNS
from tests.end_to_end.marks import needs_two_cores
from tests.session.trained import ENOUGH, compiled_towers, train_until_settled

pytestmark = pytest.mark.usefixtures("interpreted")


def chain(size: int) -> nn.Module:
    """Return layers of which no plan has lanes."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(size, size), nn.ReLU()) for _ in range(4)])


def options_of_chain(granularity: str) -> dict[str, object]:
    """Return options with which such a model has no lanes."""
    return {"debug.strict": True, "device.units": 1, "plan.remember": False, "partition.granularity": granularity}


@needs_two_cores
def test_the_verdict_is_logged_once_and_stands_in_the_report(info_log: pytest.LogCaptureFixture) -> None:
    """With the time of every variant, and how many steps it took."""
    run, inputs, found = compiled_towers()
    assert not registry.is_settled(run)
    for _ in range((1 + MAX_REPLANS) * (SKIPPED_RUNS + OBSERVED_RUNS)):
        run(*inputs).square().mean().backward()
    (state,) = apollo_compile.report(run).states
    assert (state.graph, state.stage) == (found.name, "measuring")
    assert state.num_steps > 0 and Variant.SERIAL in state.detail
    train_until_settled(run, inputs)
    (line,) = [r.getMessage() for r in info_log.records if "chosen by measuring" in r.getMessage()]
    text, metrics = str(apollo_compile.report(run)), apollo_compile.report(run).metrics()
    assert re.match(r"settled after \d+ measured steps: \d\.\d\dx as fast as [\w. ]+ \([\w ]+\)(; .*)?\n", text)
    verdict = found.tuner.verdict
    assert metrics["apollo/settled"] == 1
    assert metrics["apollo/step_ms"] == pytest.approx(verdict.standings[0].step_ns / 1e6)
    assert registry.variants_of(run) == [verdict.winner]
    assert all(standing.name in line and standing.name in text for standing in verdict.standings)
    assert f"in {verdict.num_steps} steps" in text


@needs_two_cores
def test_what_is_free_when_the_comparison_ends_is_given_back() -> None:
    """Freed memory stays in the process while it is wanted again at every step; what the losers left is not."""
    run, inputs, _ = compiled_towers()
    if not execute.keep_memory():
        pytest.skip("this C library cannot be told to keep memory")
    torch.ones(64 * 2**20)
    kept = resident_bytes()
    train_until_settled(run, inputs)
    assert resident_bytes() < kept - 128 * 2**20


def resident_bytes() -> int:
    """Return how much memory the process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("size", "granularity", "num_segments"), [(4, "module", 1), (512, "layer", 4)], ids=["small kernels", "a chain"]
)
def test_segments_compete_where_no_plan_has_lanes(size: int, granularity: str, num_segments: int) -> None:
    """Inductor's wrapper may take longer between small kernels than they take; segments of a chain are other code."""
    model, x = chain(size), torch.ones(size, size)
    with torch.no_grad():
        run = torch.compile(model, backend="apollo", options=options_of_chain(granularity))
        torch.testing.assert_close(run(x), model(x))
        (found,) = registry.find_models(model)
        (graph,) = found.graphs
        assert len(graph.compilation.partition.graph.segments) == num_segments
        train_until_settled(run, (x,))
        torch.testing.assert_close(run(x), model(x))
    verdict = found.tuner.verdict
    assert {standing.name for standing in verdict.standings} == {Variant.SERIAL, Variant.INDUCTOR}
    assert graph.variant == verdict.winner


@needs_two_cores
def test_a_backward_that_comes_after_the_verdict_is_decided_about_too() -> None:
    """A model that was evaluated with gradients for long; that of a chain learns too, though its plan has no lanes."""
    model, x = chain(256), torch.randn(256, 256)
    run = torch.compile(model, backend="apollo", options=options_of_chain("layer"))
    for _ in range(ENOUGH):
        run(x)
        if registry.is_settled(run):
            break
    (found,) = registry.find_models(model)
    first = found.tuner.verdict
    assert first is not None and [graph.has_run for graph in found.graphs] == [True]
    run(x).square().mean().backward()
    assert not registry.is_settled(run)
    train_until_settled(run, (x,))
    assert len(found.graphs) == 2 and found.tuner.verdict not in (None, first)


@needs_two_cores
def test_whoever_asks_for_the_same_numbers_gets_the_plan(
    deterministic: None, monkeypatch: pytest.MonkeyPatch, info_log: pytest.LogCaptureFixture
) -> None:
    """Variants and plans differ in the last bits, so under deterministic algorithms measured times decide nothing."""
    monkeypatch.setattr("apollo_compile.session.learner.should_replan", lambda *measured: True)
    run, inputs, found = compiled_towers(**{"plan.replan": True})
    plans = [graph.compilation.plan for graph in found.graphs]
    first = run(*inputs)
    for _ in range(ENOUGH // 40):
        run(*inputs).square().mean().backward()
    assert torch.equal(run(*inputs), first)
    assert found.tuner.verdict is None
    assert [graph.variant for graph in found.graphs] == [Variant.PLAN, Variant.PLAN]
    assert [graph.compilation.plan for graph in found.graphs] == plans
    assert registry.is_settled(run)
    assert info_log.text.count("deterministic algorithms are enabled") == 2
    assert str(apollo_compile.report(run)).count("not replanned from measurements") == 2


@needs_two_cores
def test_a_memory_quota_is_not_overruled() -> None:
    """Only the plan keeps it."""
    _, _, found = compiled_towers(**{"plan.memory_quota": 2**30})
    assert [graph.tuner for graph in found.graphs] == [None, None]
