"""Functions that are a whole step, forward and backward in one graph: eager's numbers, segments of layers, lanes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Role
from apollo_compile.session import registry
from apollo_compile.target.compilation import Compilation
from apollo_compile.tools.report import report
from tests.end_to_end.models import STRICT, Tower, TwoTowers, two_tower_inputs

Step = Callable[..., torch.Tensor]
Batch = tuple[torch.Tensor, ...]

UNCOMPILED = {"backend": "apollo", "options": {**STRICT, "runtime.bodies": "eager", "plan.min_gain": 0.0}}
"""Bodies that take no time to compile, and lanes wherever they are predicted to gain anything."""

RATE = 0.05


@pytest.fixture(autouse=True)
def _dynamo_traces_backwards() -> Iterator[None]:
    """As a user says it, around calls of what is compiled."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # type: ignore[no-untyped-call]
        yield


def by_backward(model: nn.Module, count: int = 1, *, by_grad: bool = False) -> Step:
    """Return a step that calls `backward` for every micro-batch, or `torch.autograd.grad`."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        parameters = list(model.parameters())
        sums, total = [torch.zeros_like(parameter) for parameter in parameters], torch.zeros(())
        for part in zip(*(each.chunk(count) for each in batch), strict=True):
            loss = model(*part).square().mean() / count
            if by_grad:
                gradients = torch.autograd.grad(loss, parameters)
                sums = [each + gradient for each, gradient in zip(sums, gradients, strict=True)]
            else:
                loss.backward()
            total = total + loss.detach()
        with torch.no_grad():
            for parameter, gradient in zip(parameters, sums, strict=True):
                parameter.sub_(RATE * (gradient if by_grad else parameter.grad))
                parameter.grad = None
        return total

    return step


def leaving(model: nn.Module) -> Step:
    """Return a step that leaves gradients in `.grad`."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = model(*batch).square().mean()
        loss.backward()
        return loss.detach()

    return step


def by_lists(model: nn.Module) -> Step:
    """Return a step that updates all parameters in one call after the other, with momentum, as optimizers do."""
    parameters = list(model.parameters())
    moments = [torch.zeros_like(each) for each in parameters]

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = model(*batch).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_mul_(moments, 0.9)
            torch._foreach_addcmul_(moments, gradients, gradients, 0.1)
            torch._foreach_addcdiv_(parameters, gradients, torch._foreach_add(moments, 1.0), -RATE)
        return loss.detach()

    return step


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "towers": (lambda: TwoTowers(depth=1), two_tower_inputs()),
    "chain": (lambda: Tower(64, 2), two_tower_inputs()[:1]),
}


def run(step: Step, batch: Batch, *, steps: int = 3) -> list[torch.Tensor]:
    """Return the losses of some steps."""
    torch.manual_seed(3)
    return [step(*batch).clone() for _ in range(steps)]


def assert_same_steps(
    model: nn.Module, make: Callable[[nn.Module], Step], batch: Batch, *, steps: int = 3, **options: Any
) -> None:
    """Take some steps compiled and some in eager, with a copy; losses, parameters and gradients must agree.

    Losses fall, unless steps leave gradients to an optimizer that is not there.
    """
    expected = copy.deepcopy(model)
    chosen = {**UNCOMPILED["options"], **options}  # type: ignore[dict-item]
    losses = run(torch.compile(make(model), backend="apollo", options=chosen), batch, steps=steps)
    torch.testing.assert_close(losses, run(make(expected), batch, steps=steps))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)
    assert make is leaving or losses[0] > losses[-1]


def compilation_of(model: nn.Module) -> Compilation:
    """Return the products of the only graph that trains a model."""
    (found,) = registry.find_models(model)
    assert not found.fallbacks
    (graph,) = found.graphs
    return graph.compilation


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("name", "by_grad"), [("towers", False), ("towers", True), ("chain", False)])
def test_losses_and_parameters_are_eagers(name: str, by_grad: bool, count: int) -> None:
    """After every step, whichever way gradients are asked for; towers are planned side by side."""
    make, batch = MODELS[name]
    model = make()
    assert_same_steps(model, lambda model: by_backward(model, count, by_grad=by_grad), batch)
    compilation = compilation_of(model)
    assert compilation.capture.role is Role.STEP
    lanes = {each.lane for each in compilation.plan.assignments}
    assert len(lanes) > 1 or name != "towers" or torch.get_num_threads() == 1, "one core has one lane"


def test_compiled_bodies_give_eagers_numbers() -> None:
    """What Inductor makes of forwards, backwards and updates."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    options = {"partition.min_segment_share": 0.2, "runtime.bodies": "native"}
    assert_same_steps(model, by_backward, two_tower_inputs()[:1], **options)


def test_dropout_draws_as_eager_draws() -> None:
    """With the operators of eager PyTorch, one micro-batch after the other; the backward uses the forward's masks."""
    model = TwoTowers(depth=1, dropout=0.3)
    assert_same_steps(model, lambda model: by_backward(model, 2), two_tower_inputs())


# -------------------------------------------------------------------------------------------------------- segments


def names(compilation: Compilation, suffix: str) -> Sequence[str]:
    """Return the names of the segments that end so, without their numbers."""
    found = (segment.name.partition("#")[0] for segment in compilation.partition.graph.segments)
    return [name for name in found if name.endswith(suffix)]


def test_calls_on_lists_are_an_update_per_layer() -> None:
    """Each is made as soon as the gradients of its layer are final; the numbers are eager's."""
    model = TwoTowers(depth=2)
    assert_same_steps(model, by_lists, two_tower_inputs(), **{"partition.min_segment_share": 0.0})
    layers = {f"{tower}.layers.{layer}:update" for tower in ("image", "text") for layer in range(2)}
    assert layers <= set(names(compilation_of(model), ":update"))


def test_models_of_a_step_keep_their_names() -> None:
    """Where it calls several, layers of one are not taken for layers of another."""
    image, text = Tower(64, 1), Tower(64, 1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (image(x) @ text(y).T).square().mean()
        loss.backward()
        return loss.detach()

    torch.compile(step, **UNCOMPILED)(*two_tower_inputs())
    found = {segment.module for segment in compilation_of(image).partition.graph.segments}
    assert {"image.layers.0", "text.layers.0"} <= found


# --------------------------------------------------------------------------------------------------------- refusals


def test_without_the_flag_the_graph_breaks_and_the_report_names_it() -> None:
    """The step runs all the same: forward in segments, backward by autograd."""
    model = TwoTowers(depth=1)
    with torch._dynamo.config.patch(trace_autograd_ops=False):  # type: ignore[no-untyped-call]
        assert_same_steps(model, leaving, two_tower_inputs(), steps=1)
    assert "torch._dynamo.config.trace_autograd_ops = True" in str(report(model))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_run_in_eager(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo leaves them out of the graph, so a line says why, and the gradients are eager's."""
    model = nn.Linear(64, 64)

    def double(tensor: torch.Tensor) -> torch.Tensor | None:
        if kind == "register_hook":
            return 2 * tensor
        tensor.grad = None if tensor.grad is None else 2 * tensor.grad
        return None

    expected = copy.deepcopy(model)
    for each in (model, expected):
        getattr(each.weight, kind)(double)
    batch = two_tower_inputs()[:1]
    run(torch.compile(leaving(model), **UNCOMPILED), batch, steps=1)
    run(leaving(expected), batch, steps=1)
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)
    assert "hooks" in caplog.text and not registry.find_models(model)


def test_what_dynamo_cannot_trace_runs_in_pieces() -> None:
    """An optimizer's own step breaks the graph; the numbers are eager's."""

    def stepping(of: nn.Module) -> Step:
        optimizer, backward = torch.optim.SGD(of.parameters(), lr=RATE), leaving(of)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = backward(*batch)
            optimizer.step()
            return loss

        return step

    assert_same_steps(TwoTowers(depth=1), stepping, two_tower_inputs())
