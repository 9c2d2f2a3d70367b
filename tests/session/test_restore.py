"""Graphs that come back from AOTAutograd's cache: neither traced nor compiled again, and no number differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session import bodies
from apollo_compile.session import compile as session_compile
from apollo_compile.torch_bridge import serialize
from apollo_compile.torch_bridge.serialize import bundle_body
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import STRICT, TwoTowers, assert_same_training, train, two_tower_inputs
from tests.end_to_end.step_cases.models import Wrapped
from tests.failures import raising
from tests.session.trained import compiled_towers, hits, training_of, warm

pytestmark = pytest.mark.usefixtures("own_cache")


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if a graph is planned or compiled."""
    for room, name in ((session_compile, "plan_graph"), (bodies, "compile_bodies"), (session_compile, "compile_whole")):
        monkeypatch.setattr(room, name, raising(AssertionError("planned or compiled again")))


def normalized() -> nn.Module:
    """Return two equal branches with dropout, and statistics that every step changes."""
    left, right = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3))
        for _ in range(2)
    )
    return Wrapped(lambda own, image: own.left(image) * own.right(image), left=left, right=right)


@warm("training, dropout and BatchNorm included")
@pytest.mark.parametrize("kind", [pytest.param("towers", marks=pytest.mark.soak), "normalized"])
def test_a_second_compile_is_the_first_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same losses, gradients and buffers to the bit, dropout included; same segments, plan and report."""
    model = TwoTowers(dropout=0.3) if kind == "towers" else normalized()
    inputs = two_tower_inputs() if kind == "towers" else (torch.randn(4, 3, 12, 12),)
    options = {"plan.min_gain": 0.0, "plan.replan": False}
    expected, first = training_of(model, *inputs, **options)
    assert hits() == (0, 1)
    forbid_tracing(monkeypatch)
    got, second = training_of(model, *inputs, **options)
    assert hits() == (1, 1)
    assert_same_training(expected, got)
    assert [graph.compilation.program.instructions for graph in second.graphs] == [
        graph.compilation.program.instructions for graph in first.graphs
    ]
    assert [graph.compilation.capture.name for graph in second.graphs] == [
        f"{second.name} forward",
        f"{second.name} backward",
    ]
    assert all(graph.trace().spans for graph in second.graphs)


@warm("inference")
def test_inference_comes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, without a backward."""
    model, inputs = TwoTowers().eval(), two_tower_inputs()
    for expected in ((0, 1), (1, 1)):
        torch._dynamo.reset()
        with torch.no_grad():
            output = torch.compile(model, backend="apollo", options=STRICT)(*inputs)
            torch.testing.assert_close(output, model(*inputs), rtol=1e-4, atol=1e-5)
        assert hits() == expected
        forbid_tracing(monkeypatch)


@warm("a graph that falls back")
def test_a_graph_that_falls_back_does_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason comes back, with the plan that was not worth it, and the code from torch's own entry."""
    model, inputs = nn.Linear(1024, 1024, bias=False), (torch.randn(512, 1024),)
    options = {"plan.autotune": True}
    expected, first = training_of(model, *inputs, **options)
    assert [len(first.graphs), len(first.unprofitable)] == [0, 1], first.fallbacks
    assert hits() == (0, 2)
    forbid_tracing(monkeypatch)
    got, second = training_of(model, *inputs, **options)
    assert hits() == (2, 2)
    assert_same_training(expected, got)
    assert [reason for _, reason in second.fallbacks] == [reason for _, reason in first.fallbacks]
    assert [found.partition.graph.segments for found in second.unprofitable] == [
        found.partition.graph.segments for found in first.unprofitable
    ]


@needs_two_cores
@pytest.mark.parametrize(
    "variant",
    [Variant.INDUCTOR, *(pytest.param(variant, marks=pytest.mark.soak) for variant in (Variant.SERIAL, Variant.PLAN))],
)
def test_every_variant_can_be_used_by_a_graph_that_came_back(variant: str) -> None:
    """Inductor compiles the graph of the bundle, and what its code saves fits the backward's segments."""
    for expected in ((0, 1), (1, 1)):
        run, inputs, found = compiled_towers(**{"plan.remember": True})
        assert hits() == expected
    forward, backward = found.graphs
    for graph in (forward, backward):
        graph.tuner = None  # nobody but this test decides
        graph.prepare()
    forward.use(variant)
    found_gradients, expected_gradients = (
        torch.autograd.grad(call(*inputs).square().mean(), list(run.parameters()))
        for call in (run, partial(TwoTowers.forward, run))
    )
    torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-3, atol=1e-5)


@warm("a damaged bundle")
def test_a_damaged_bundle_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it, the graph runs; the next process makes a bundle that is right."""
    model, inputs, options = TwoTowers(), two_tower_inputs(), {"debug.strict": False}
    training_of(model, *inputs, **options)
    with monkeypatch.context() as patch:
        patch.setattr(serialize, "unbundle_body", raising(OSError("damaged")))
        training, found = training_of(model, *inputs, **options)
    assert hits() == (0, 2) and len(found.graphs) == 2
    assert_same_training(train(model, lambda run: run(*inputs).square().mean()), training)
    for expected in ((0, 3), (1, 3)):
        training_of(model, *inputs, **options)
        assert hits() == expected


@warm("a library that is gone")
def test_a_body_whose_library_is_gone_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have cleaned the cache of compiled code."""
    model, inputs = TwoTowers(), two_tower_inputs()
    with monkeypatch.context() as patch:
        patch.setattr(
            serialize, "bundle_body", lambda body: replace(bundle_body(body), library=str(tmp_path / "gone.so"))
        )
        expected, _ = training_of(model, *inputs)
    forbid_tracing(monkeypatch)
    training, found = training_of(model, *inputs)
    assert hits() == (1, 1)
    assert all(body.entry_address is not None for body in found.graphs[0].bodies)
    assert_same_training(expected, training)


def test_threads_with_python_can_run_a_body_that_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes cannot write to inference tensors, so this graph runs on the caller's thread."""
    inputs, results = torch.randn(4, 3, 12, 12), []
    for expected in ((0, 1), (1, 1)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.inference_mode():
            model = normalized()
            torch.manual_seed(1)
            output = torch.compile(model, backend="apollo", options=STRICT)(inputs)
        assert hits() == expected
        forbid_tracing(monkeypatch)
        results.append({"output": output, **model.state_dict()})
    torch.testing.assert_close(results[1], results[0])
    assert int(results[1]["left.1.num_batches_tracked"]) == 1
