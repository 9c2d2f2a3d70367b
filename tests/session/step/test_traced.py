"""Rivals of a program: the step as Inductor traces it, and the loop in eager."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.step.traced import add_gradients, gradients_of_loop
from apollo_compile.torch_bridge.gradients import are_finite, describe_difference
from tests.end_to_end.step_cases.turns import compile_nothing, take_turns
from tests.end_to_end.twins import EAGER, Batch, Twins, chain_batch, chain_loss, compile_step, layer
from tests.session.step.towers import COMPARED

LARGE, ROUNDED, OTHER = torch.ones(4), torch.ones(4) + 1e-3, torch.tensor([1.0, 1.0, 1.0, 1.1])
TINY = torch.full((4,), 1e-8)


@pytest.mark.parametrize(
    ("found", "expected", "is_alike"),
    [
        ([ROUNDED], [LARGE], True),
        ([LARGE, -TINY], [LARGE, TINY], True),
        ([-TINY], [TINY], None),
        ([OTHER], [LARGE], None),
        ([OTHER.bfloat16()], [LARGE.bfloat16()], True),
        ([LARGE * torch.inf], [LARGE], None),
        ([LARGE], [LARGE * torch.nan], False),
        ([1j * LARGE], [LARGE + 0j], None),
    ],
    ids=[
        *("rounding", "nothing beside the others", "small ones alone", "others"),
        *("rounding of bfloat16", "infinite", "a loop that is not finite", "complex"),
    ],
)
def test_gradients_are_those_of_the_loop_but_for_rounding(
    found: list[torch.Tensor], expected: list[torch.Tensor], is_alike: bool | None
) -> None:
    """Of each gradient, as far as it matters beside the others; where the loop's are not finite, nothing is known."""
    assert are_finite(expected) is (is_alike is not False)
    if is_alike is not False:
        difference = describe_difference(found, expected)
        told = r"one of shape \[4\] by .* of its norm, where 0\.01 may be rounding"
        assert difference is None if is_alike else re.fullmatch(told, str(difference))


def test_the_gradients_of_a_loop_are_those_that_it_adds() -> None:
    """And zeros where a loss does not depend on a parameter."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    parts, weights = torch.randn(3, 2, 4).unbind(), (0.5, 0.25, 0.25)
    call: Callable[[torch.Tensor], torch.Tensor] = lambda part: model[0](part).square().mean()  # noqa: E731
    found = gradients_of_loop(call, parts, weights, list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(each.requires_grad for each in add_gradients(call, parts, weights))
    torch.testing.assert_close(found, [model[0].weight.grad, torch.zeros(4, 4)])


def test_weights_are_read_in_every_step_of_a_loop_inside_of_autocast() -> None:
    """Autocast keeps its copies of weights as long as it is on, which a loop in eager would read."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = compile_step(model, chain_loss, optimizer, options={**EAGER, "plan.autotune": True})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [float(step(chain_batch(0))) for _ in range(60)]
    assert "eager" not in str(step.verdicts)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses[:20]))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].requires_grad_(True),
        lambda model: model[0].requires_grad_(False),
        lambda model: model.append(nn.Linear(16, 16)),
    ],
    ids=["a layer is thawed", "a layer is frozen", "a layer comes"],
)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["before", "afterwards"])
def test_what_is_trained_may_change_before_inductor_traces_the_step_and_afterwards(
    is_compiled: bool, change: Callable[[nn.Sequential], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are of the parameters that the program has: guards of the loss function or its own know of others.

    Nothing else is compiled then, and the step is a loop.
    """
    compile_nothing(monkeypatch)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))
    step = compile_step(model, chain_loss, options=COMPARED)
    while not (step.tuners and step.tuners[0].is_settled):
        step(chain_batch(0))
    (tuner,) = step.tuners
    while is_compiled and not (tuner.traced is not None and tuner.traced.is_ready):
        step(chain_batch(0))
    while step.tuners[0].begin_step(0) is not Variant.TRACED:  # if nothing changes
        pass
    change(model)
    model.zero_grad()
    expected = copy.deepcopy(model)
    step(chain_batch(1))
    chain_loss(expected, chain_batch(1)).backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_a_traced_step_updates_and_leaves_gradients_as_a_program_does(
    keep_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take the fused kernel, which a loop takes only if the user asks for it; keep gradients that nobody steps."""
    compile_nothing(monkeypatch)
    turns = take_turns(monkeypatch)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    stepped = [*model[0].parameters(), *model[2].parameters()]
    optimizer = torch.optim.AdamW(stepped, lr=1e-2)
    expected, others = copy.deepcopy((model, optimizer))
    step = compile_step(model, chain_loss, optimizer, keep_gradients=keep_gradients, options=COMPARED)
    fused, num_updates = torch._fused_adamw_, Counter[str]()
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **settings: calls.append(fused(*args, **settings)))
    for number in range(12):
        calls: list[None] = []
        model.zero_grad()
        step(chain_batch(number))
        expected.zero_grad()
        chain_loss(expected, chain_batch(number)).backward()
        others.step()
        num_updates[turns.latest[-1] if turns.latest else "first"] += len(calls)
        is_kept = [keep_gradients, keep_gradients, True, True, keep_gradients, keep_gradients]
        assert [each.grad is not None for each in model.parameters()] == is_kept
        kept = [
            (a.grad, b.grad)
            for a, b in zip(model.parameters(), expected.parameters(), strict=True)
            if a.grad is not None
        ]
        for mine, other in [*kept, *zip(model.parameters(), expected.parameters(), strict=True)]:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert num_updates[Variant.TRACED] and not num_updates[Variant.EAGER]


def test_a_gradient_that_is_the_weight_of_a_micro_batch_is_a_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip gradients of a loss to which a parameter is added: its gradient is the weight, which later steps take."""
    turns = take_turns(monkeypatch)

    def make() -> nn.Module:
        model = layer()
        model.register_parameter("offset", nn.Parameter(torch.zeros(())))
        return model

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return chain_loss(model, batch) + model.offset

    options = {**COMPARED, "runtime.bodies": "python"}
    twins = Twins(make, loss_of, partial(torch.optim.AdamW, lr=0.01, eps=0.01), clip_grad_norm=0.1, options=options)
    for number in range(16):
        twins.take(chain_batch(number))
    assert turns.num_steps[Variant.TRACED] > 1
