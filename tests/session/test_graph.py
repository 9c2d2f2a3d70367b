"""A graph of a model: Inductor's version of it, and what happens where a comparison fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

from apollo_compile.ir import Variant
from apollo_compile.session import bodies, registry
from apollo_compile.session import compile as session_compile
from apollo_compile.torch_bridge import whole
from apollo_compile.torch_bridge.interpret import interpret_bodies
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import TwoTowers, two_tower_inputs
from tests.failures import raising
from tests.session.trained import AUTOTUNED, ENOUGH, compiled_towers

pytestmark = needs_two_cores


@pytest.mark.usefixtures("interpreted")
def test_a_rival_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and training goes on."""
    monkeypatch.setattr(session_compile, "compile_again", raising(RuntimeError("no compiler")))
    run, inputs, found = compiled_towers(**{"debug.strict": False, "plan.compile_share": 1e6})
    for _ in range(ENOUGH):
        run(*inputs).square().mean().backward()
        if registry.is_settled(run) and not found.tuner.tuner.is_more_to_come:
            break
    assert all(Variant.INDUCTOR not in graph.variants.available for graph in found.graphs)
    assert caplog.text.count("Inductor is not compared: Inductor cannot compile") == 1


def test_inductors_version_is_compiled_with_the_settings_of_the_bodies_or_comes_from_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user may have changed settings for the first call alone; a later process does not lower the graph again."""
    seen, compile_fx_inner = [], whole.compile_fx_inner

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(inductor_config.emulate_precision_casts)
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(bodies, "compile_bodies", lambda pieces, **_: interpret_bodies(pieces))
    with inductor_config.patch(emulate_precision_casts=True):
        _, _, found = compiled_towers()
    monkeypatch.setattr(whole, "compile_fx_inner", watch)
    counters.clear()
    for graph in found.graphs:
        graph.prepare()
    assert seen == [True, True] and not inductor_config.emulate_precision_casts
    counts = counters["inductor"]
    assert (counts["fxgraph_cache_bypass"], counts["fxgraph_cache_hit"] + counts["fxgraph_cache_miss"]) == (0, 2)


@pytest.mark.soak
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


@pytest.mark.usefixtures("interpreted")
def test_a_comparison_that_fails_leaves_the_plan_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of ours in the midst of a comparison is one warning, and training goes on with the plans."""
    run, inputs, found = compiled_towers(**{"debug.strict": False})
    forward, backward = found.graphs
    while forward.variant == Variant.PLAN:
        run(*inputs).square().mean().backward()
    assert forward.variant == backward.variant != Variant.PLAN  # the turn of the segments
    monkeypatch.setattr(found.tuner.tuner, "begin_step", raising(RuntimeError("a defect")))
    for _ in range(3):
        run(*inputs).square().mean().backward()
    assert caplog.text.count("autotuning failed, so the plan runs from now on: RuntimeError: a defect") == 1
    assert [graph.variant for graph in found.graphs] == [Variant.PLAN, Variant.PLAN]
    assert registry.is_settled(run)
