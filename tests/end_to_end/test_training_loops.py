"""What training loops do besides a forward and a backward: everything ends as in eager."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from apollo_compile.ir import Role
from apollo_compile.session import registry
from tests.end_to_end.models import assert_same_training, train
from tests.end_to_end.step_cases.models import Wrapped

Options = dict[str, Any]

WIDTH = 16
LEFT, RIGHT = (torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
"""Two batches for each of two towers."""


def loop(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Training loops", subject)


compiled: list[nn.Module] = []
"""Models of the test at hand: their graphs live as long as they do, and are counted when it is over."""


@pytest.fixture(autouse=True)
def _let_go() -> None:
    compiled.clear()


def _product(own: Any, left: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
    one = own.left(left)
    return one @ (one if right is None else own.right(right)).T


def pair(forward: Callable[..., torch.Tensor] = _product) -> nn.Module:
    """Return two towers of one layer; they are the same in most tests, so that their code is compiled once."""
    left, right = (nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(2))
    return Wrapped(forward, left=left, right=right)


def same_gradients(
    play: Callable[[Callable[..., torch.Tensor], nn.Module], None], model: nn.Module, options: Options
) -> tuple[nn.Module, nn.Module]:
    """Let `play` use a model in eager and compiled; the gradients that it leaves must agree. Return both copies."""
    expected, actual = copy.deepcopy(model), copy.deepcopy(model)
    play(expected, expected)
    play(torch.compile(actual, **options), actual)
    assert_same_gradients(actual, expected)
    return actual, expected


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    """Compare the gradients of a model that was compiled with those of a copy."""
    compiled.append(actual)
    for (name, left), right in zip(expected.named_parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def one_step(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
    """Take a forward and a backward."""
    run(LEFT[0], RIGHT[0]).square().mean().backward()


@loop("gradient accumulation")
def test_gradients_accumulate_over_micro_batches(either: Options) -> None:
    """Three backwards add up before one optimizer step, which the next round sees."""

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            (run(LEFT[step % 2], RIGHT[0]).square().mean() / 3).backward()
            if step == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    same_gradients(play, pair(), either)


@loop("several forwards before a backward")
def test_two_forwards_may_come_before_their_backwards(either: Options) -> None:
    """In one sum, and one after the other in either order: each backward reads what its own forward saved."""

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        first, second = run(LEFT[0], RIGHT[0]), run(LEFT[1], RIGHT[1])
        (first.square().mean() + second.sum()).backward()
        first, second = run(LEFT[1], RIGHT[0]), run(LEFT[0], RIGHT[1])
        second.square().mean().backward()
        first.square().mean().backward()

    same_gradients(play, pair(), either)


@loop("retain_graph")
@pytest.mark.parametrize("is_first", (True, False))
def test_a_retained_graph_gives_its_gradients_again(is_first: bool, either: Options) -> None:
    """Two backwards of one forward double the gradients: nothing that was saved is used up by the first.

    The backward is compiled for that step, or in the one before, for a graph that is used once.
    """

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        if not is_first:
            run(LEFT[1], RIGHT[1]).square().mean().backward()
        loss = run(LEFT[0], RIGHT[0]).square().mean()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    same_gradients(play, pair(), either)


@loop("double backward")
def test_a_double_backward_is_refused_in_the_words_of_torch(either: Options) -> None:
    """AOTAutograd has no second derivatives, with any backend; the first ones and later steps are right."""
    model = pair()
    run = torch.compile(model, **either)
    x = LEFT[0].clone().requires_grad_()
    for function in (run, torch.compile(model, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(function(x, RIGHT[0]).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()
    same_gradients(lambda run, _: run(LEFT[0], RIGHT[0]).sum().backward(), model, either)


@loop("tied weights")
def test_a_weight_that_two_towers_share_gets_both_gradients(either: Options) -> None:
    """The sum is made once, whichever lane is first."""
    model = pair()
    model.right[0].weight = model.left[0].weight
    same_gradients(one_step, model, either)


@loop("frozen modules")
def test_the_backward_of_a_frozen_tower_vanishes(either: Options) -> None:
    """Its parameters keep None, and no segment of the backward is its."""
    model = pair()
    model.left.requires_grad_(False)
    same_gradients(one_step, model, either)
    (found,) = [entry for entry in registry.compiled_models() if len(entry.graphs) == 2][-1:]
    captures = [graph.compilation.capture for graph in found.graphs]
    names = {each.role: {node.module for node in each.nodes if node.kind == "compute"} for each in captures}
    assert any(name.startswith("left") for name in names["forward"])
    assert any(name.startswith("right") for name in names["backward"])
    assert not any(name.startswith("left") for name in names["backward"])


@loop("absent modality")
def test_a_modality_may_be_absent_in_a_step(either: Options) -> None:
    """Steps with and without the right input alternate; without it, its tower gets no gradient at all."""

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        for right in (RIGHT[0], None, RIGHT[1], None):
            model.zero_grad(set_to_none=True)
            run(LEFT[0], right).square().mean().backward()
            assert (model.right[0].weight.grad is None) == (right is None)

    same_gradients(play, pair(), either)


@loop("hooks")
def test_hooks_see_and_change_what_they_do_in_eager(either: Options) -> None:
    """Forward hooks, backward hooks of modules and tensors, and hooks behind the accumulation of a gradient."""
    seen: list[list[tuple[str, float]]] = []

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        calls: list[tuple[str, float]] = []
        seen.append(calls)
        model.left.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
        model.left.register_forward_hook(lambda _m, _i, output: output + 1)
        model.left[1].register_full_backward_hook(lambda _m, _i, own: calls.append(("module", _sum(own[0]))))
        model.left[0].weight.register_hook(lambda gradient: gradient * 3)
        bias = model.right[2].bias
        bias.register_post_accumulate_grad_hook(lambda own: calls.append(("accumulated", _sum(own.grad))))
        output = run(LEFT[0], RIGHT[0])
        output.register_hook(lambda gradient: calls.append(("output", _sum(gradient))))
        output.square().mean().backward()

    same_gradients(play, pair(), either)
    expected, actual = seen
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert [value for _, value in actual] == pytest.approx([value for _, value in expected], rel=1e-3)


def _sum(tensor: torch.Tensor | None) -> float:
    assert tensor is not None
    return float(tensor.detach().double().sum())


class _Scaled(torch.autograd.Function):
    """Double a tensor; its gradient is not the derivative, so it shows whether this backward was used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor + x.cos(), None


@loop("custom autograd functions")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, while Dynamo traces the function
def test_the_backward_of_a_custom_function_is_the_users(either: Options) -> None:
    """Also where it is not the derivative of its forward."""
    model = pair(lambda own, x, y: _Scaled.apply(own.left(x), 2.0) @ _Scaled.apply(own.right(y), 3.0).T)
    same_gradients(one_step, model, either)


@loop("activation checkpointing")
def test_checkpointed_towers_train_as_in_eager(lanes: Options, uncompiled: Options) -> None:
    """What is recomputed has the masks of dropout that the forward drew: losses and gradients are Inductor's."""

    def join(own: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        one = checkpoint(lambda x: nn.functional.dropout(own.left(x), 0.5, own.training), left, use_reentrant=False)
        return one @ checkpoint(own.right, right, use_reentrant=False).T

    model = pair(join)
    same_gradients(one_step, copy.deepcopy(model).eval(), uncompiled)

    def seeded(**options: Any) -> Any:
        torch.manual_seed(3)
        return train(model, lambda run: run(LEFT[0], RIGHT[0]).square().mean(), steps=3, **options)

    assert_same_training(seeded(backend="inductor"), seeded(**lanes))


@loop("activation checkpointing, reentrant")
def test_towers_with_reentrant_checkpoints_train_as_in_eager(either: Options) -> None:
    """Their inputs need gradients, for eager to see any."""

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        left, right = (each[0].clone().requires_grad_() for each in (LEFT, RIGHT))
        run(left, right).square().mean().backward()
        model.seen = (left.grad, right.grad)  # type: ignore[assignment]

    run = partial(checkpoint, use_reentrant=True)
    model = pair(lambda own, left, right: run(own.left, left) @ run(own.right, right).T)
    actual, expected = same_gradients(play, model, either)
    torch.testing.assert_close(actual.seen, expected.seen, rtol=1e-4, atol=1e-5)


def _keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@loop("activation checkpointing, selective")
def test_towers_that_keep_products_alone_train_as_in_eager(either: Options) -> None:
    """The rest of what the backward reads is computed again."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    run = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    same_gradients(one_step, pair(lambda own, left, right: run(own.left, left) @ run(own.right, right).T), either)


@loop("threads with inputs of their own")
def test_threads_get_the_gradients_of_their_own_inputs(either: Options) -> None:
    """All begin at once, and each runs forward and backward several times between those of others."""
    model = pair()
    run = torch.compile(model, **either)
    inputs = [(left * scale, right) for scale in (1.0, 2.0) for left in LEFT for right in RIGHT]

    def step(function: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> tuple[Any, ...]:
        left = left.clone().requires_grad_()
        output = function(left, right)
        return output.detach(), *torch.autograd.grad(output.square().mean(), (left, *model.parameters()))

    wanted = [step(model, *each) for each in inputs]
    step(run, *inputs[0])
    begin = threading.Barrier(len(inputs))

    def work(own: tuple[torch.Tensor, torch.Tensor]) -> list[Any]:
        begin.wait()
        return [step(run, *own) for _ in range(10)]

    with ThreadPoolExecutor(len(inputs)) as threads:
        found = list(threads.map(work, inputs))
    compiled.append(model)
    for results, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(results, [expected] * 10, rtol=1e-4, atol=1e-5)


@loop("graph breaks")
def test_a_broken_graph_trains_in_its_parts(either: Options) -> None:
    """Each part is a model of its own, cut and planned for itself."""

    def join(own: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        one = own.left(left)
        torch._dynamo.graph_break()
        return one @ own.right(right).T

    same_gradients(one_step, pair(join), either)
    assert sum(len(model.graphs) for model in registry.compiled_models()[-2:]) == 4


@loop("modes in turns")
def test_train_eval_and_modes_without_gradients_take_turns(either: Options) -> None:
    """A step after no_grad, inference_mode and eval is as if they had not been."""

    def play(run: Callable[..., torch.Tensor], model: nn.Module) -> None:
        run(LEFT[0], RIGHT[0]).sum().backward()
        with torch.no_grad():
            assert not run(LEFT[0], RIGHT[0]).requires_grad
        with torch.inference_mode():
            assert not run(LEFT[0], RIGHT[0]).requires_grad
        model.eval()
        run(LEFT[1], RIGHT[0]).sum().backward()
        model.train()
        run(LEFT[0], RIGHT[1]).sum().backward()

    same_gradients(play, pair(), either)


def _same_steps(
    model: nn.Module, options: Options, prepare: Callable[[nn.Module], object] = lambda model: None
) -> nn.Module:
    """Accumulate the gradients of three steps, each with its backward inside; return the model that was compiled."""

    def step(model: nn.Module, left: torch.Tensor) -> torch.Tensor:
        loss = model(left, RIGHT[0]).square().mean()
        loss.backward()
        return loss.detach()

    expected, actual = copy.deepcopy(model), copy.deepcopy(model)
    for each in (expected, actual):
        prepare(each)
    run = torch.compile(step, **options)
    for left in (*LEFT, LEFT[0]):
        torch.testing.assert_close(run(actual, left), step(expected, left), rtol=1e-4, atol=1e-5)
    assert_same_gradients(actual, expected)
    return actual


@loop("compiled autograd")
def test_the_graph_of_compiled_autograd_runs_in_segments(either: Options) -> None:
    """What autograd does is a graph of its own, which accumulates gradients; a hook is in it."""

    def hook(model: nn.Module) -> None:
        model.left[0].weight.register_hook(lambda gradient: gradient * 3)

    with torch._dynamo.config.patch(compiled_autograd=True):
        model = _same_steps(pair(), either, hook)
    roles = [graph.compilation.capture.role for entry in registry.find_models(model) for graph in entry.graphs]
    assert roles[0] is Role.FORWARD and set(roles[1:]) == {Role.INFERENCE}


@loop("backward in the traced function")
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no backward()")
def test_a_traced_backward_gives_eagers_gradients(either: Options) -> None:
    """With `trace_autograd_ops`; AOTAutograd leaves hooks out of it, whatever compiles the graph."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        _same_steps(pair(), either)
