"""A step as one program: memory that is shared, gradients that it leaves or releases, and errors in its midst."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.step.split import split_evenly
from tests.end_to_end import twins
from tests.end_to_end.step_cases.turns import compile_nothing, take_turns
from tests.session.step.towers import batch_of, loss_of, make_towers, sgd

NUM_STEPS = 12


def test_memory_that_is_shared_later_is_seen() -> None:
    """Parameters that get the memory of others, and batches in memory of a parameter, between two steps."""
    pair = twins.Twins(make_towers, loss_of, sgd)
    for number in range(16):
        batches = [batch_of(number)] * 2
        if number == 5:
            for each in pair.both:
                each.right[0][0].weight.data = each.left[0][0].weight.data
        if number > 10:
            batches = [each.left[1][0].weight.detach()[:8] for each in pair.both]
        pair.take(*batches)
        assert ("shares memory" in str(pair.step.verdicts)) is (number >= 5)


def test_gradients_of_another_dtype_are_left_by_the_loop() -> None:
    """Run loops while a parameter of bfloat16 asks for gradients of float32, and programs afterwards."""
    pair = twins.Twins(lambda: make_towers(depth=1), loss_of, sgd)
    for number in range(6):
        for each in pair.both:
            first = next(each.parameters())
            first.grad = None
            first.grad_dtype = torch.float64 if number in (2, 3) else torch.float32
        pair.take(batch_of(number))
        assert next(pair.model.parameters()).grad.dtype is next(pair.expected.parameters()).grad.dtype
        assert ("may have another dtype than its parameter" in str(pair.step.verdicts)) is (number in (2, 3))


@pytest.mark.parametrize("name", ["layers.0.0.weight", "layers.0.1.running_mean", "layers.2.0.weight"])
def test_a_backward_after_a_step_sees_what_was_written_to(name: str) -> None:
    """Raise in a pending backward as eager does, whichever kernel has updated; one layer has no optimizer."""
    torch._dynamo.reset()
    model = twins.Chain()
    step = twins.compile_step(
        model, twins.chain_loss, torch.optim.AdamW(model.layers[:2].parameters()), options=twins.EAGER
    )
    for seed in range(3):
        product = torch.ones(16, requires_grad=True) * model.state_dict(keep_vars=True)[name]
        step(twins.chain_batch(seed))
        is_written = not name.startswith("layers.2")
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if is_written else nullcontext():
            product.sum().backward()
        model.zero_grad()
    assert twins.ran_as_program(step)


@pytest.mark.parametrize("num_good", [0, 1], ids=["first", "last"])
def test_an_error_inside_a_program_says_which_parameters_were_updated(
    num_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are as they were; where none was, nothing is said."""
    model = make_towers(depth=1)
    step = twins.compile_step(model, loss_of, sgd(model.parameters()), options=twins.EAGER)
    for number in range(3):
        step(batch_of(number))
    parts = step.tuners[0].program.optimizer
    takes = [parts.step] * num_good

    def fail(parameters: Any, gradients: Any) -> None:
        if not takes:
            raise RuntimeError("the optimizer failed")
        takes.pop()(parameters, gradients)

    monkeypatch.setattr(parts, "step", fail)
    before = twins.state_of(model)
    with pytest.raises(RuntimeError, match="the optimizer failed") as raised:
        step(batch_of(3))
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    notes = "".join(note for note in getattr(raised.value, "__notes__", []) if "updated" in note)
    assert bool(changed) is bool(notes) is bool(num_good)
    assert {name for name in before if name in notes} == changed


@pytest.mark.parametrize("keep", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize(("count", "clip"), [(1, None), (2, 0.01)])
def test_gradients_are_released_or_kept_in_every_variant(
    count: int, clip: float | None, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that releases them trains as one that does not."""
    turns = take_turns(monkeypatch)
    compile_nothing(monkeypatch)
    (model, own), (eager, others) = twins.make_towers_twice(partial(torch.optim.SGD, lr=1e-4, momentum=0.9))
    settings = {"clip_grad_norm": clip, "keep_gradients": keep, "options": {**twins.EAGER, "plan.autotune": True}}
    step = twins.compile_step(model, twins.towers_loss, own, microbatches=count, **settings)
    for seed in range(NUM_STEPS):
        step(twins.towers_batch(seed))
        twins.run_loop(eager, twins.towers_loss, split_evenly(twins.towers_batch(seed), count), None, clip)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad if keep else None, rtol=1e-3, atol=1e-5)
        others.step()
        others.zero_grad()
    torch.testing.assert_close(twins.state_of(model), twins.state_of(eager), rtol=1e-4, atol=1e-5)
    (tuner,) = step.tuners
    assert turns.has_left_the_loop and not turns.missing(tuner)


def test_gradients_that_no_optimizer_uses_stay() -> None:
    """They add up, as in the loop, whose `zero_grad` knows nothing of them, while a tower is not in the optimizer.

    The tower joins, and then a parameter leaves; such steps are other programs.
    """
    both = twins.make_towers_twice(partial(torch.optim.SGD, lr=1e-3))
    (model, optimizer), (eager, others) = both
    groups = [updates.param_groups[0]["params"] for _, updates in both]
    num_own = len(list(next(model.children()).parameters()))
    joining = [[group.pop() for _ in group[num_own:]] for group in groups]
    step = twins.compile_step(model, twins.towers_loss, optimizer, keep_gradients=False, options=twins.EAGER)
    for seed in range(10):
        for (_, updates), group, new in zip(both, groups, joining, strict=True):
            if seed == 5:
                updates.add_param_group({"params": new, "lr": 1e-4})
            if seed == 8:
                group.pop()
        step(twins.towers_batch(seed))
        twins.run_loop(eager, twins.towers_loss, [twins.towers_batch(seed)], others)
        others.zero_grad()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(twins.state_of(model), twins.state_of(eager), rtol=1e-4, atol=1e-5)
    assert twins.ran_as_program(step)


def test_gradients_that_were_zeroed_in_place_make_a_loop_that_says_what_to_do() -> None:
    """Zeros are gradients, too, that an optimizer would use."""
    model = twins.Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    step = twins.compile_step(model, twins.chain_loss, optimizer, options=twins.EAGER)
    for seed in range(3):
        step(twins.chain_batch(seed))
    assert "layers.0.0.weight has one; set it to None before the step" in step.verdicts[0]


def test_a_layer_that_is_replaced_by_one_of_the_same_shape_gets_a_program() -> None:
    """Dynamo calls the same graph, with other parameters, and the optimizer steps these instead."""
    pair = twins.Twins(make_towers, loss_of, sgd)
    for number in range(10):
        if number == 4:
            assert pair.step.tuners
            for each, updates in zip(pair.both, (pair.own, pair.others), strict=True):
                torch.manual_seed(0)
                each.left[0][0] = nn.Linear(16, 16)
                updates.param_groups[0]["params"] = list(each.parameters())
        pair.take(batch_of(number))
    (tuner,) = pair.step.tuners
    assert tuner.current is not Variant.LOOP and tuner.held_back is None
