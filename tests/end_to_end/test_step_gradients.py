"""Gradients that a step releases as its optimizer has used them, and those that it leaves in `.grad`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from tests.end_to_end.step_cases.turns import compile_nothing, take_turns
from tests.end_to_end.twins import EAGER, make_towers_twice, run_loop, state_of, towers_batch, towers_loss

NUM_STEPS = 12


@pytest.mark.parametrize("keep", (False, True), ids=("released", "kept"))
@pytest.mark.parametrize(("count", "clip"), ((1, None), (2, 0.01)))
def test_gradients_are_released_or_kept_in_every_variant(
    count: int, clip: float | None, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that releases them trains as one that does not."""
    turns = take_turns(monkeypatch)
    compile_nothing(monkeypatch)
    (model, own), (eager, others) = make_towers_twice(partial(torch.optim.SGD, lr=1e-4, momentum=0.9))
    options = {**EAGER, "plan.autotune": True}
    step = compile_step(
        model, towers_loss, own, microbatches=count, clip_grad_norm=clip, keep_gradients=keep, options=options
    )
    for seed in range(NUM_STEPS):
        step(towers_batch(seed))
        run_loop(eager, towers_loss, split_evenly(towers_batch(seed), count), None, clip)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            if keep:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
            else:
                assert mine.grad is None
        others.step()
        others.zero_grad()
    torch.testing.assert_close(state_of(model), state_of(eager), rtol=1e-4, atol=1e-5)
    (tuner,) = step.tuners
    assert turns.has_left_the_loop and not turns.missing(tuner)


def test_gradients_that_no_optimizer_uses_stay() -> None:
    """They add up from step to step, as in the loop, whose `zero_grad` knows nothing of them."""
    (model, _), (eager, _) = make_towers_twice(torch.optim.SGD)

    def first_tower(of: Any) -> Any:
        return next(iter(of.children())).parameters()

    own, others = (torch.optim.SGD(first_tower(each), lr=0.01) for each in (model, eager))
    step = compile_step(model, towers_loss, own, options=EAGER)
    for seed in range(6):
        step(towers_batch(seed))
        run_loop(eager, towers_loss, [towers_batch(seed)], others)
    stepped = {id(each) for each in first_tower(model)}
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if id(mine) in stepped:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_leaves_the_optimizer_keeps_its_gradient() -> None:
    """Such steps are a loop, and a line says so."""
    (model, optimizer), _ = make_towers_twice(partial(torch.optim.SGD, lr=0.01))
    step = compile_step(model, towers_loss, optimizer, options=EAGER)
    for seed in range(6):
        if seed == 4:
            left = optimizer.param_groups[0]["params"].pop()
        step(towers_batch(seed))
    assert left.grad is not None and "does not step some parameters" in "".join(step.verdicts)
