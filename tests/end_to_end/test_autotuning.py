"""Autotuning between the plan, the serial plan and Inductor, in real training loops."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import apollo_compile
from apollo_compile.autotune.comparison import MAX_ROUNDS, MAX_STEPS_PER_TURN
from apollo_compile.device.cpu import execute
from apollo_compile.ir import Variant
from apollo_compile.session import compile as session_compile
from apollo_compile.session import registry
from apollo_compile.session.learner import MAX_REPLANS, OBSERVED_RUNS, SKIPPED_RUNS
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge import whole
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import TwoTowers, two_tower_inputs

AUTOTUNED = {
    "debug.strict": True,
    "device.profile": "cpu",
    "plan.min_gain": 0.0,
    "plan.remember": False,
    "plan.replan": False,
    "plan.time_limit_s": 0.5,
}
"""The packaged profile gives two towers lanes on every machine with two cores; times measured on a busy one may not."""

ENOUGH = 30 + (2 + 2) * MAX_ROUNDS * MAX_STEPS_PER_TURN
"""Steps after which learning is over, and two comparisons of two, the second with Inductor."""


class Pictures(nn.Module):
    """Two branches of convolutions, whose outputs and gradients are not contiguous in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1))
        self.right = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.GELU(), nn.Conv2d(16, 16, 5, padding=2))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return a transposed view of the branches' product."""
        return (self.left(left) * self.right(right)).permute(0, 2, 3, 1)


def train_until_settled(run: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], steps: int = ENOUGH) -> None:
    """Take steps until nothing is being decided; later ones could show drift, which opens the comparison again."""
    for _ in range(steps):
        run(*inputs).square().mean().backward()
        if registry.is_settled(run):
            return
    pytest.fail(f"not settled after {steps} steps")


def compiled_towers(**options: object) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], CompiledModel]:
    """Return two towers, their inputs and what was compiled for a training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options={**AUTOTUNED, **options})
    run(*inputs).square().mean().backward()
    model.zero_grad()
    (found,) = registry.find_models(model)
    return run, inputs, found


@needs_two_cores
def test_the_verdict_is_logged_once_and_stands_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    """With the time of every variant, and how many steps it took."""
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        run, inputs, found = compiled_towers()
        assert not registry.is_settled(run)
        for _ in range((1 + MAX_REPLANS) * (SKIPPED_RUNS + OBSERVED_RUNS)):
            run(*inputs).square().mean().backward()
        (state,) = apollo_compile.report(run).states
        assert (state.graph, state.stage) == (found.name, "measuring")
        assert state.num_steps > 0 and Variant.SERIAL in state.detail
        train_until_settled(run, inputs)
    (line,) = [r.getMessage() for r in caplog.records if "chosen by measuring" in r.getMessage()]
    text = str(apollo_compile.report(run))
    assert re.match(r"settled after \d+ measured steps: \d\.\d\dx as fast as [\w. ]+ \([\w ]+\)(; .*)?\n", text)
    metrics = apollo_compile.report(run).metrics()
    assert metrics["apollo/settled"] == 1
    assert metrics["apollo/step_ms"] == pytest.approx(found.tuner.verdict.standings[0].step_ns / 1e6)
    verdict = found.tuner.verdict
    assert verdict is not None
    assert registry.variants_of(run) == [verdict.winner]
    for standing in verdict.standings:
        assert standing.name in line
        assert standing.name in text
    assert f"in {verdict.num_steps} steps" in text


def test_a_graph_of_one_segment_is_inductors_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """The segment would be the same code, so nothing of ours is in the way; no warning, and the report says it."""
    layer, x = nn.Linear(1024, 1024), torch.ones(512, 1024)
    with caplog.at_level(logging.INFO, logger="apollo_compile"), torch.no_grad():
        run = torch.compile(layer, backend="apollo", options={"debug.strict": True, "plan.remember": False})
        torch.testing.assert_close(run(x), layer(x))
    (record,) = [r for r in caplog.records if "falls back to torch.compile" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert "nothing to gain" in record.getMessage()
    assert "nothing to gain" in str(apollo_compile.report(layer))
    assert registry.find_models(layer)[0].graphs == [] and registry.variants_of(layer) == [Variant.INDUCTOR]


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
    layer = nn.Sequential(*[nn.Sequential(nn.Linear(size, size), nn.ReLU()) for _ in range(4)])
    x = torch.ones(size, size)
    options = {"debug.strict": True, "device.units": 1, "plan.remember": False, "partition.granularity": granularity}
    with torch.no_grad():
        run = torch.compile(layer, backend="apollo", options=options)
        torch.testing.assert_close(run(x), layer(x))
        (graph,) = registry.find_models(layer)[0].graphs
        assert len(graph.compilation.partition.graph.segments) == num_segments
        for _ in range(ENOUGH):
            torch.testing.assert_close(run(x), layer(x))
            if registry.is_settled(run):
                break
    verdict = registry.find_models(layer)[0].tuner.verdict
    assert verdict is not None
    assert {standing.name for standing in verdict.standings} == {Variant.SERIAL, Variant.INDUCTOR}
    assert graph.variant == verdict.winner


@needs_two_cores
def test_a_backward_that_comes_after_the_verdict_is_decided_about_too() -> None:
    """A model that was evaluated with gradients for long; that of a chain learns too, though its plan has no lanes."""
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]), torch.randn(256, 256)
    options = {"debug.strict": True, "device.units": 1, "plan.remember": False, "partition.granularity": "layer"}
    run = torch.compile(model, backend="apollo", options=options)
    for _ in range(ENOUGH):
        run(x)
        if registry.is_settled(run):
            break
    (found,) = registry.find_models(model)
    first = found.tuner.verdict
    assert first is not None and [graph.has_run for graph in found.graphs] == [True]
    run(x).square().mean().backward()
    assert not registry.is_settled(run)
    for _ in range(ENOUGH):
        run(x).square().mean().backward()
        if registry.is_settled(run):
            break
    assert registry.is_settled(run) and len(found.graphs) == 2
    assert found.tuner.verdict not in (None, first)


@needs_two_cores
def test_whoever_asks_for_the_same_numbers_gets_the_plan(
    deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Variants and plans differ in the last bits, so under deterministic algorithms measured times decide nothing."""
    monkeypatch.setattr("apollo_compile.session.learner.should_replan", lambda *measured: True)
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
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
    assert caplog.text.count("deterministic algorithms are enabled") == 2
    assert str(apollo_compile.report(run)).count("not replanned from measurements") == 2


@needs_two_cores
def test_a_rival_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and training goes on."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(session_compile, "compile_again", fail)
    run, inputs, found = compiled_towers(**{"debug.strict": False, "plan.compile_share": 1e6})
    with caplog.at_level(logging.WARNING, logger="apollo_compile"):
        for _ in range(ENOUGH):
            run(*inputs).square().mean().backward()
            if registry.is_settled(run) and not found.tuner.tuner.is_more_to_come:
                break
    assert all(Variant.INDUCTOR not in graph.variants.available for graph in found.graphs)
    assert caplog.text.count("Inductor is not compared: Inductor cannot compile") == 1


@needs_two_cores
def test_inductors_version_comes_from_its_cache() -> None:
    """A later process does not lower the whole graph again, in the midst of a user's step."""
    _, _, found = compiled_towers()
    counts = torch._dynamo.utils.counters["inductor"]
    before = counts["fxgraph_cache_bypass"], counts["fxgraph_cache_hit"] + counts["fxgraph_cache_miss"]
    for graph in found.graphs:
        graph.prepare()
    after = counts["fxgraph_cache_bypass"], counts["fxgraph_cache_hit"] + counts["fxgraph_cache_miss"]
    assert after == (before[0], before[1] + len(found.graphs))


@needs_two_cores
def test_inductors_version_is_compiled_with_the_settings_of_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the user may have changed for the first call alone."""
    seen = []
    compile_fx_inner = whole.compile_fx_inner

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(inductor_config.emulate_precision_casts)
        return compile_fx_inner(*args, **kwargs)

    with inductor_config.patch(emulate_precision_casts=True):
        _, _, found = compiled_towers()
    monkeypatch.setattr(whole, "compile_fx_inner", watch)
    for graph in found.graphs:
        graph.prepare()
    assert seen == [True, True] and not inductor_config.emulate_precision_casts


@pytest.mark.soak
@needs_two_cores
def test_inductors_version_is_compiled_under_any_mode_of_the_caller() -> None:
    """The comparison may reach it in the midst of a step under autocast or inference mode."""
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options=AUTOTUNED)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        expected = run(*inputs)
        (graph,) = registry.find_models(model)[0].graphs
        graph.tuner = None
        graph.prepare()
        graph.use(Variant.INDUCTOR)
        actual = run(*inputs)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@needs_two_cores
def test_a_comparison_that_fails_leaves_the_plan_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of ours in the midst of a comparison is one warning, and training goes on with the plans."""
    run, inputs, found = compiled_towers(**{"debug.strict": False})
    forward, backward = found.graphs
    while forward.variant == Variant.PLAN:
        run(*inputs).square().mean().backward()
    assert forward.variant == backward.variant != Variant.PLAN  # the turn of the segments

    def fail() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(found.tuner.tuner, "begin_step", fail)
    with caplog.at_level(logging.WARNING, logger="apollo_compile"):
        for _ in range(3):
            run(*inputs).square().mean().backward()
    assert caplog.text.count("autotuning failed, keeping the plan: RuntimeError: a defect") == 1
    assert [graph.variant for graph in found.graphs] == [Variant.PLAN, Variant.PLAN]
    assert registry.is_settled(run)


@needs_two_cores
def test_a_memory_quota_is_not_overruled() -> None:
    """Only the plan keeps it."""
    _, _, found = compiled_towers(**{"plan.memory_quota": 2**30})
    assert [graph.tuner for graph in found.graphs] == [None, None]


@needs_two_cores
@pytest.mark.parametrize(
    "variant",
    [Variant.INDUCTOR, *(pytest.param(variant, marks=pytest.mark.soak) for variant in (Variant.SERIAL, Variant.PLAN))],
)
def test_a_second_run_begins_where_the_first_one_ended(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its plan and its winner, whichever that was; nothing is planned, measured or compared again."""
    options = {"plan.remember": True, "plan.replan": True, "device.cache": tmp_path}
    run, inputs, first = compiled_towers(**options)
    train_until_settled(run, inputs)
    assert first.tuner.verdict is not None
    files = sorted((tmp_path / "history").iterdir())
    assert len(files) == len(first.graphs) == 2
    for file in files:
        content = json.loads(file.read_text())
        assert content["finding"]["variant"] == first.tuner.verdict.winner
        content["finding"]["variant"] = content["finding"]["verdict"]["standings"][0]["name"] = variant
        file.write_text(json.dumps(content))

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("planned or compiled again")

    monkeypatch.setattr("apollo_compile.passes.plan.solve_apart", fail)
    monkeypatch.setattr(session_compile, "compile_again", fail)
    run, inputs, second = compiled_towers(**options)
    torch.testing.assert_close(run(*inputs), TwoTowers.forward(run, *inputs), rtol=1e-4, atol=1e-5)
    assert registry.is_settled(run)
    assert [graph.variant for graph in second.graphs] == ([] if variant == Variant.INDUCTOR else [variant, variant])
    if variant != Variant.INDUCTOR:
        assert [g.compilation.plan for g in second.graphs] == [g.compilation.plan for g in first.graphs]
        run(*inputs)
        assert second.tuner.verdict is not None and second.tuner.verdict.is_remembered, "it is not watched"
    text = str(apollo_compile.report(run))
    assert "of an earlier training loop" in text
    assert ("Inductor was the fastest when it was measured" in text) == (variant == Variant.INDUCTOR)
