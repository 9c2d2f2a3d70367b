"""Graphs that come back from AOTAutograd's cache: neither traced nor compiled again, and no number differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.utils import counters

from apollo_compile.ir import Variant
from apollo_compile.session import bodies, registry
from apollo_compile.session import compile as session_compile
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge import serialize
from apollo_compile.torch_bridge.serialize import BundledBody, bundle_body
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import STRICT, TwoTowers, assert_same_training, train, two_tower_inputs


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path) -> Iterator[None]:
    """Let AOTAutograd keep what this test compiles, for this test only; Inductor's code is shared as ever."""
    with functorch_config.patch(enable_autograd_cache=True), torch.compiler.config.patch(cache_key_tag=str(tmp_path)):
        counters.clear()
        yield


def warm(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Warm start", subject)


def hits() -> tuple[int, int]:
    """Return how many Dynamo graphs came from AOTAutograd's cache, and how many it could not give."""
    counted = counters["aot_autograd"]
    return counted["autograd_cache_hit"], counted["autograd_cache_miss"]


def training_of(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> tuple[Any, CompiledModel]:
    """Train a copy of `model`; return losses, gradients and state, and what was compiled for it."""
    torch.manual_seed(1)
    training = train(model, lambda run: run(*inputs).square().mean(), backend="apollo", options={**STRICT, **options})
    return training, registry.compiled_models()[-1]


def let_win(variant: str, model: nn.Module, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Train until the comparison is over, and let its finding say that `variant` won, whichever did."""
    run = torch.compile(model, backend="apollo", options={**STRICT, **options})
    for _ in range(2000):
        run(*inputs).square().mean().backward()
        if registry.is_settled(model):
            break
    (found,) = registry.find_models(model)
    verdict = found.tuner.verdict
    assert verdict is not None and verdict.standings[0].num_rounds > 0, (found.fallbacks, verdict)
    files = sorted((options["device.cache"] / "history").iterdir())
    assert len(files) == 2
    for file in files:
        content = json.loads(file.read_text())
        content["finding"]["variant"] = content["finding"]["verdict"]["standings"][0]["name"] = variant
        file.write_text(json.dumps(content))


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if a graph is planned or compiled."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("planned or compiled again")

    for room, name in ((session_compile, "plan_graph"), (bodies, "compile_bodies"), (session_compile, "compile_whole")):
        monkeypatch.setattr(room, name, fail)


class Pair(nn.Module):
    """One module, of two inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the module of the sum."""
        return self.inner(left + right)  # type: ignore[no-any-return]


class Normalized(nn.Module):
    """Two equal branches with dropout, and statistics that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3))
            for _ in range(2)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the product of both branches."""
        return self.left(image) * self.right(image)


@warm("training, dropout and BatchNorm included")
@pytest.mark.parametrize("kind", [pytest.param("towers", marks=pytest.mark.soak), "normalized"])
def test_a_second_compile_is_the_first_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same losses, gradients and buffers to the bit, dropout included; same segments, plan and report."""
    model = TwoTowers(dropout=0.3) if kind == "towers" else Normalized()
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
    reasons = [reason for _, reason in first.fallbacks]
    assert [reason for _, reason in second.fallbacks] == reasons
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
    model, inputs = TwoTowers(), two_tower_inputs()
    options = {"plan.autotune": True, "plan.min_gain": 0.0, "plan.replan": False}
    for _ in range(2):
        _, found = training_of(model, *inputs, **options)
    assert hits() == (1, 1)
    torch._dynamo.reset()
    run = torch.compile(model, backend="apollo", options={**STRICT, **options})
    run(*inputs).square().mean().backward()
    (found,) = registry.find_models(model)
    assert hits() == (2, 1)
    forward, backward = found.graphs
    for graph in (forward, backward):
        graph.tuner = None  # nobody but this test decides
        graph.prepare()
    forward.use(variant)
    model.zero_grad()
    run(*inputs).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*inputs).square().mean().backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-5)


@needs_two_cores
@pytest.mark.parametrize("variant", [Variant.INDUCTOR, pytest.param(Variant.SERIAL, marks=pytest.mark.soak)])
def test_a_verdict_that_came_later_holds(variant: str, tmp_path: Path) -> None:
    """The bundle is of the first step; what the comparison said after that stands in the history."""
    model, inputs = TwoTowers(), two_tower_inputs()
    options = {"plan.autotune": True, "plan.min_gain": 0.0, "device.cache": tmp_path}
    let_win(variant, model, inputs, options)
    training, found = training_of(model, *inputs, **options)
    assert hits() == (1, 2 if variant == Variant.INDUCTOR else 1)
    assert [graph.variant for graph in found.graphs] == ([] if variant == Variant.INDUCTOR else [variant, variant])
    assert [name for name, _ in found.fallbacks] == ([found.name] if variant == Variant.INDUCTOR else [])
    assert found.verdict is not None and found.verdict.is_remembered
    assert_same_training(train(model, lambda run: run(*inputs).square().mean()), training)


@pytest.mark.soak
@needs_two_cores
def test_inductors_code_is_not_kept_longer_than_the_verdict(tmp_path: Path) -> None:
    """Once nobody knows any more that Inductor was faster, that is found out again."""
    model, inputs = TwoTowers(), two_tower_inputs()
    options = {"plan.autotune": True, "plan.min_gain": 0.0, "device.cache": tmp_path}
    let_win(Variant.INDUCTOR, model, inputs, options)
    with torch.compiler.config.patch(cache_key_tag=f"{tmp_path} whole"):
        _, found = training_of(model, *inputs, **options)
        assert [len(found.graphs), len(found.unprofitable)] == [0, 1]
        counters.clear()
        for file in (tmp_path / "history").iterdir():
            file.unlink()
        training, found = training_of(model, *inputs, **options)
    assert hits() == (0, 1)
    assert [len(found.graphs), len(found.unprofitable)] == [2, 0]
    assert_same_training(train(model, lambda run: run(*inputs).square().mean()), training)


@warm("other options")
def test_what_shapes_a_graph_is_part_of_the_key() -> None:
    """Other options, other graphs; how much is logged matters to none."""
    model, inputs = Pair(nn.Linear(64, 64)), two_tower_inputs()
    training_of(model, *inputs)
    for number, options in enumerate([{"partition.granularity": "module"}, {"plan.planner": "serial"}], start=2):
        training_of(model, *inputs, **options)
        assert hits() == (0, number)
    training_of(model, *inputs, **{"debug.log": "INFO"})
    assert hits() == (1, 3)


def test_settings_of_attention_are_part_of_the_key() -> None:
    """Which kernel torch takes is decided while it traces."""
    q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    for expected, flash in [((0, 1), True), ((0, 2), False), ((1, 2), True)]:
        torch._dynamo.reset()
        torch.backends.cuda.enable_flash_sdp(flash)
        try:
            attention = torch.compile(nn.functional.scaled_dot_product_attention, backend="apollo", options=STRICT)
            attention(q, k, v)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert hits() == expected


@warm("custom operators")
def test_operators_of_the_user_are_compiled_by_every_process() -> None:
    """Nothing tells what they do now: their code may be another one."""
    for factor in (3.0, 5.0):
        torch._dynamo.reset()

        @torch.library.custom_op("apollo_warm::scale", mutates_args=())
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        scale.register_fake(torch.empty_like)
        scale.register_autograd(lambda context, gradient, factor=factor: gradient * factor)
        x = torch.ones(4, requires_grad=True)
        torch.compile(lambda x: scale(x).sum(), backend="apollo", options=STRICT)(x).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full((4,), factor))
    assert hits() == (0, 0)


@pytest.mark.parametrize("switch", ["torch", "apollo", "dump", "eager"])
def test_it_can_be_switched_off(switch: str, tmp_path: Path) -> None:
    """By torch's own setting, with everything else that is remembered, and where stages are to be looked at."""
    options: dict[str, Any] = {
        "torch": {},
        "apollo": {"plan.remember": False},
        "dump": {"debug.dump": tmp_path / "dump"},
        "eager": {"runtime.bodies": "eager"},
    }[switch]
    with functorch_config.patch(enable_autograd_cache=switch != "torch"):
        for _ in range(2):
            training_of(Pair(nn.Linear(64, 64)), *two_tower_inputs(), **options)
    assert hits() == (0, 0)


@warm("dynamic shapes")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TwoTowers(depth=1), id="lanes", marks=pytest.mark.soak),
        pytest.param(Pair(nn.Linear(64, 64)), id="nothing to gain"),
    ],
)
def test_changing_shapes_are_compiled_by_every_process(model: nn.Module) -> None:
    """A graph with dynamic shapes is not kept, and runs as it would."""
    for _ in range(2):
        torch._dynamo.reset()
        run = torch.compile(model, backend="apollo", options=STRICT, dynamic=True)
        for batch in (8, 12):
            inputs = two_tower_inputs(batch)
            torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert hits()[0] == 0


@warm("a damaged bundle")
def test_a_damaged_bundle_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it, the graph runs; the next process makes a bundle that is right."""
    model, inputs, options = TwoTowers(), two_tower_inputs(), {"debug.strict": False}
    training_of(model, *inputs, **options)

    def fail(bundled: BundledBody) -> None:
        raise OSError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(serialize, "unbundle_body", fail)
        training, found = training_of(model, *inputs, **options)
    assert hits() == (0, 2)
    assert len(found.graphs) == 2
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
            model = Normalized()
            torch.manual_seed(1)
            output = torch.compile(model, backend="apollo", options=STRICT)(inputs)
        assert hits() == expected
        forbid_tracing(monkeypatch)
        results.append({"output": output, **model.state_dict()})
    torch.testing.assert_close(results[1], results[0])
    assert int(results[1]["left.1.num_batches_tracked"]) == 1


def fail_in_backwards(compile_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for a compiler that knows forwards only."""
    if kwargs.get("is_backward"):
        raise ValueError("no such backward")
    return compile_forward(*args, **kwargs)


@pytest.mark.parametrize("remember", [True, False])
def test_a_backward_that_nothing_can_compile_fails_when_it_is_called(
    remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own error, though it compiles with the forward where that is kept."""
    for room, name in ((session_compile, "compile_whole"), (bodies, "compile_bodies")):
        monkeypatch.setattr(room, name, partial(fail_in_backwards, getattr(room, name)))
    torch._dynamo.reset()
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options={"plan.remember": remember})
    output = run(*inputs)
    torch.testing.assert_close(output, model(*inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no such backward"):
        output.sum().backward()


_SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
torch.compiler.config.cache_key_tag = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
run = torch.compile(model, backend="apollo", options={"plan.min_gain": 0.0, "plan.autotune": False})
losses = []
for _ in range(3):
    loss = run(torch.linspace(-1, 1, 128).reshape(8, 16)).square().mean()
    loss.backward()
    losses.append(loss.item())
grads = [parameter.grad.abs().sum().item() for parameter in model.parameters()]
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"], losses, grads]))
"""


def test_a_second_process_begins_with_what_the_first_one_compiled(tmp_path: Path) -> None:
    """The same numbers from the same seed."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_AUTOGRAD_CACHE"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)

    def run() -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    first, second = run(), run()
    assert [first[0], second[0]] == [0, 1]
    assert second[1:] == first[1:]


def test_graphs_whose_arguments_share_memory_in_other_ways_are_apart(tmp_path: Path) -> None:
    """AOTAutograd's cache does not tell them from each other, although the traced views differ."""

    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y.add_(1)
        return x.sum() * y

    def call(run: Callable[..., torch.Tensor], offset: int, size: int) -> list[torch.Tensor]:
        memory = torch.arange(float(size))
        return [run(memory[:16], memory[offset : offset + 16]), memory]

    options = {**STRICT, "device.cache": tmp_path, "plan.autotune": False}
    found = []
    for offset, size in ((0, 16), (8, 24), (4, 24), (8, 24)):
        torch._dynamo.reset()
        run = torch.compile(write, backend="apollo", options=options)
        torch.testing.assert_close(call(run, offset, size), call(write, offset, size))
        found.append(hits()[0])
    assert found == [0, 0, 0, 1]
