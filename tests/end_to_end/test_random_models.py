"""Random models train as in eager, whatever their operators, shapes, views and writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apollo_compile.ir import Variant
from apollo_compile.session import registry
from apollo_compile.store.profiles import default_profile, save_profile
from tests.end_to_end.models import STRICT
from tests.end_to_end.twins import Twins
from tests.random_models import RandomModel, Step, inputs, loss_of, recipes

Result = tuple[list[torch.Tensor], dict[str, torch.Tensor | None], list[Any]]
"""Tensors that were returned, those that the model has, and what those that were returned share."""


@pytest.fixture(scope="module")
def free_lanes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options for a machine on which neither launches nor hand-overs cost anything: tiny segments are worth lanes."""
    path = tmp_path_factory.mktemp("profile") / "free.json"
    free = {"kernel_ns": 0, "parallel_ns": 100_000, "cold_ns": 0, "launch_ns": 0, "tensor_ns": 0, "handover_ns": 0}
    save_profile(replace(default_profile(2), **free), path)
    return {
        "device.profile": path,
        "partition.min_segment_share": 0.0,
        "plan.planner": "greedy",
        "plan.min_gain": 0.0,
        "plan.time_limit_s": 0.05,
    }


def _train(model: RandomModel, run: Callable[..., Any], rows: Sequence[int]) -> Result:
    """Return the outputs of a step for each number of rows, with the gradient of the input; gradients and buffers."""
    outputs: list[torch.Tensor] = []
    relations: list[Any] = []
    for count in rows:
        x, y = inputs(model.recipe, count)
        found = run(x, y)
        relations += _relations(found, x, y)
        loss = loss_of(found)
        if loss.requires_grad:
            loss.backward()
        outputs += [*(value.detach().clone() for value in found), x if x.grad is None else x.grad]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs, {**gradients, **dict(model.named_buffers())}, relations


def _relations(outputs: Sequence[torch.Tensor], *others: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return of each output whether it has a gradient, and with which tensors it shares memory."""
    memories = [tensor.untyped_storage().data_ptr() for tensor in [*outputs, *others]]
    return [
        (output.requires_grad, [memory == other for other in memories])
        for output, memory in zip(outputs, memories, strict=False)
    ]


def _check(options: dict[str, Any], most: int, most_steps: int = 24) -> int:
    """Compare up to `most` random models of up to `most_steps` with eager; return how many used two lanes.

    About one in six runs without gradients, one in four has dynamic shapes. AOTAutograd merges equal computations, so
    where memory is shared otherwise than in eager, it is its choice if it does the same alone.
    """
    num_lanes: list[int] = []

    @settings(max_examples=most)
    @example(recipe=[Step(4, 0, 4, 1), Step(4, 0, 5, 1)], use=_train, is_dynamic=False)  # AOTAutograd makes one
    @given(
        recipe=recipes(most_steps),
        use=st.sampled_from([_train] * 5 + [torch.no_grad()(_train)]),
        is_dynamic=st.sampled_from([False] * 3 + [True]),
    )
    def check(recipe: list[Step], use: Callable[..., Result], is_dynamic: bool) -> None:
        torch._dynamo.reset()
        eager = RandomModel(recipe, scales=is_dynamic)
        compiled, again = copy.deepcopy(eager), copy.deepcopy(eager)
        shapes, rows = ({"dynamic": True}, (3, 5)) if is_dynamic else ({}, (3, 3))
        run = torch.compile(compiled, backend="apollo", options={**STRICT, **options}, **shapes)
        actual, expected = use(compiled, run, rows), use(eager, eager, rows)
        torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-9, atol=1e-9, equal_nan=True)
        assert [has_gradient for has_gradient, _ in actual[2]] == [has_gradient for has_gradient, _ in expected[2]]
        plans = [graph.compilation.plan for model in registry.find_models(compiled) for graph in model.graphs]
        num_lanes.append(max((len({item.lane for item in plan.assignments}) for plan in plans), default=0))
        if actual[2] != expected[2]:
            traced = torch.compile(again, backend="aot_eager", **shapes)
            assert actual[2] == use(again, traced, rows)[2], "without apollo, others share memory"

    check()
    return sum(count > 1 for count in num_lanes)


@pytest.mark.slow
@pytest.mark.robustness("Special operators", "random ones, operator by operator")
def test_random_models_train_as_in_eager(free_lanes: dict[str, Any]) -> None:
    """Segments run operator by operator, so whatever differs is the doing of the partitioner, the plan or the lanes.

    Tracing takes most of the time, so models are small in every run, and larger in `make soak`.
    """
    is_soak = settings.default.max_examples != settings.get_profile("default").max_examples
    most, most_steps = (settings.default.max_examples, 24) if is_soak else (24, 10)
    assert _check({**free_lanes, "runtime.bodies": "eager"}, most, most_steps) > most // 3


@pytest.mark.soak
@pytest.mark.robustness("Special operators", "random ones, compiled")
def test_random_models_that_are_compiled_train_as_in_eager(free_lanes: dict[str, Any]) -> None:
    """Fewer, of larger segments, since each of them goes through a compiler."""
    assert _check({**free_lanes, "partition.min_segment_share": 0.2}, max(6, settings.default.max_examples // 20)) > 0


def _loss_of_part(model: RandomModel, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(model(*part))


def _check_steps(options: dict[str, Any], most: int, most_steps: int) -> int:
    """Compare steps of up to `most` random models with the loop over micro-batches; return how many were linked."""
    num_linked = 0

    @settings(max_examples=most)
    @given(recipe=recipes(most_steps), count=st.sampled_from((1, 2, 3)))
    def check(recipe: list[Step], count: int) -> None:
        nonlocal num_linked
        x, y = inputs(recipe)
        batch = [(x.detach() * (1 + number), y * (1 + number / 2)) for number in range(count)]
        if not _loss_of_part(RandomModel(recipe), batch[0]).requires_grad:
            return
        twins = Twins(
            partial(RandomModel, recipe),
            _loss_of_part,  # type: ignore[arg-type]
            partial(torch.optim.SGD, lr=1e-3),
            split=lambda batch, _: batch,
            options={**STRICT, **options, "plan.replan": False},
            **{"tolerance": (1e-9, 1e-9), "of_gradients": (1e-9, 1e-9), "equal_nan": True},
        )
        for _ in range(3):
            twins.take(batch)
        num_linked += twins.step.verdicts == [Variant.PLAN]

    check()
    return num_linked


@pytest.mark.slow
@pytest.mark.robustness("Special operators", "random ones, steps of several micro-batches")
def test_steps_of_random_models_are_those_of_the_loop(free_lanes: dict[str, Any]) -> None:
    """Few in every run, since each is traced; many in `make soak`."""
    is_soak = settings.default.max_examples != settings.get_profile("default").max_examples
    most, most_steps = (settings.default.max_examples, 24) if is_soak else (10, 10)
    assert _check_steps({**free_lanes, "runtime.bodies": "eager"}, most, most_steps) > most // 3
