"""What a Dynamo graph reuses from earlier processes, and what keeps it from doing so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.utils import counters

import apollo_compile
from apollo_compile.ir import Variant
from apollo_compile.session import bodies, registry
from apollo_compile.session import compile as session_compile
from apollo_compile.session.model import CompiledModel
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import STRICT, TwoTowers, assert_same_training, train, two_tower_inputs
from tests.failures import raising
from tests.session.trained import AUTOTUNED, compiled_towers, hits, train_until_settled, training_of, warm
from tests.torch_settings import changed

pytestmark = pytest.mark.usefixtures("own_cache")

REMEMBERED = {**AUTOTUNED, "plan.autotune": True, "plan.remember": True}


def let_win(variant: str, **options: Any) -> CompiledModel:
    """Train two towers until the comparison is over, and let its finding say that `variant` won by far."""
    run, inputs, found = compiled_towers(**options)
    train_until_settled(run, inputs)
    verdict = found.tuner.verdict
    assert verdict is not None and verdict.standings[0].num_rounds > 0, (found.fallbacks, verdict)
    files = sorted((options["device.cache"] / "history").iterdir())
    assert len(files) == len(found.graphs) == 2
    for file in files:
        content = json.loads(file.read_text())
        assert content["finding"]["variant"] == verdict.winner
        winner, *losers = content["finding"]["verdict"]["standings"]
        content["finding"]["variant"] = winner["name"] = variant
        for loser in losers:
            loser["ratio"] = 2.0
        file.write_text(json.dumps(content))
    return found


@needs_two_cores
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "variant",
    [Variant.INDUCTOR, *(pytest.param(variant, marks=pytest.mark.soak) for variant in (Variant.SERIAL, Variant.PLAN))],
)
def test_a_second_run_begins_where_the_first_one_ended(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its plan and its winner, whichever that was; nothing is planned, measured or compared again."""
    options = {**REMEMBERED, "plan.replan": True, "device.cache": tmp_path}
    fail = raising(AssertionError("planned or compiled again"))
    with functorch_config.patch(enable_autograd_cache=False):
        first = let_win(variant, **options)
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


@needs_two_cores
@pytest.mark.parametrize("variant", [Variant.INDUCTOR, pytest.param(Variant.SERIAL, marks=pytest.mark.soak)])
def test_a_verdict_that_came_later_holds(variant: str, tmp_path: Path) -> None:
    """The bundle is of the first step; what the comparison said after that stands in the history."""
    model, inputs, options = TwoTowers(), two_tower_inputs(), {**REMEMBERED, "device.cache": tmp_path}
    let_win(variant, **options)
    training, found = training_of(model, *inputs, **options)
    is_inductors = variant == Variant.INDUCTOR
    assert hits() == (1, 2 if is_inductors else 1)
    assert [graph.variant for graph in found.graphs] == ([] if is_inductors else [variant, variant])
    assert [name for name, _ in found.fallbacks] == ([found.name] if is_inductors else [])
    assert found.verdict is not None and found.verdict.is_remembered
    assert_same_training(train(model, lambda run: run(*inputs).square().mean()), training)


@pytest.mark.soak
@needs_two_cores
def test_inductors_code_is_not_kept_longer_than_the_verdict(tmp_path: Path) -> None:
    """Once nobody knows any more that Inductor was faster, that is found out again."""
    model, inputs, options = TwoTowers(), two_tower_inputs(), {**REMEMBERED, "device.cache": tmp_path}
    let_win(Variant.INDUCTOR, **options)
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


class Pair(nn.Linear):
    """A layer of two inputs."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(left + right)


@warm("other options")
def test_what_shapes_a_graph_is_part_of_the_key() -> None:
    """Other options, other graphs; how much is logged matters to none."""
    model, inputs = Pair(64, 64), two_tower_inputs()
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
        with changed(torch.backends.cuda.enable_flash_sdp, flash, True):
            torch.compile(nn.functional.scaled_dot_product_attention, backend="apollo", options=STRICT)(q, k, v)
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
            training_of(Pair(64, 64), *two_tower_inputs(), **options)
    assert hits() == (0, 0)


@warm("dynamic shapes")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TwoTowers(depth=1), id="lanes", marks=pytest.mark.soak),
        pytest.param(Pair(64, 64), id="nothing to gain"),
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
    output = torch.compile(model, backend="apollo", options={"plan.remember": remember})(*inputs)
    torch.testing.assert_close(output, model(*inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no such backward"):
        output.sum().backward()


def train_for_a_process() -> list[Any]:
    """Return whether the graphs came from the cache, and losses and gradients of three steps from a seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    run = torch.compile(model, backend="apollo", options={"plan.min_gain": 0.0, "plan.autotune": False})
    losses = []
    for _ in range(3):
        loss = run(torch.linspace(-1, 1, 128).reshape(8, 16)).square().mean()
        loss.backward()
        losses.append(loss.item())
    gradients = [float(parameter.grad.abs().sum()) for parameter in model.parameters() if parameter.grad is not None]
    return [hits()[0], losses, gradients]


def test_a_second_process_begins_with_what_the_first_one_compiled(tmp_path: Path) -> None:
    """Numbers from the same seed are the same.

    Both run outside of this process: AOTAutograd's key has the name of the module that imported torch first, because
    pickle finds `torch.contiguous_format` there, and here that module depends on the tests that run.
    """
    code = (
        "import json, sys, torch\n"
        "from tests.session.test_warm_start import train_for_a_process\n"
        "torch.compiler.config.cache_key_tag = sys.argv[1]\n"
        "print(json.dumps(train_for_a_process()))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_AUTOGRAD_CACHE"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    first, second = (
        json.loads(subprocess.check_output(command, env=environment, text=True).splitlines()[-1]) for _ in range(2)
    )
    assert [first[0], second[0]] == [0, 1] and second[1:] == first[1:]


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
