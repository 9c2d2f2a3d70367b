"""Whether gradients are lent: until one is held, and again once they are released."""

from __future__ import annotations

import torch

from apollo_compile.device.gpu.lending import FIRST_PATIENCE, Lending
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_execute import make_pair, step


def copied_until_lent(lending: Lending, *, is_held: bool, most: int = 1000) -> int:
    """Return after how many copied runs gradients are lent again, if a gradient of each is held or not."""
    held = []
    for number in range(most):
        if lending.changes() and lending.is_on:
            return number
        gradient = torch.ones(1)
        lending.note([gradient, None])
        if is_held:
            held.append(gradient)
        del gradient
    return most


def test_gradients_are_lent_again_after_some_runs_in_which_they_were_released() -> None:
    """Each time that was wrong, after twice as many."""
    lending = Lending()
    assert lending.is_on and not lending.changes()
    for patience in (FIRST_PATIENCE, 2 * FIRST_PATIENCE, 4 * FIRST_PATIENCE):
        lending.refuse()
        assert not lending.is_on
        assert copied_until_lent(lending, is_held=False) == patience and lending.is_on


def test_gradients_that_are_always_held_are_asked_about_less_and_less() -> None:
    """And never lent."""
    lending = Lending()
    lending.refuse()
    assert copied_until_lent(lending, is_held=True) == 1000
    assert copied_until_lent(lending, is_held=False) > FIRST_PATIENCE


def test_what_must_not_be_lent_never_is() -> None:
    """Even if it is released."""
    lending = Lending()
    lending.forbid()
    assert not lending.is_on and copied_until_lent(lending, is_held=False) == 1000


def test_gradients_that_are_held_before_anything_is_lent_are_copied_at_once() -> None:
    """Those of runs on lanes tell what training does with them."""
    lending = Lending()
    gradient = torch.ones(1)
    lending.note([gradient])
    assert lending.changes() and not lending.is_on
    del gradient
    assert copied_until_lent(lending, is_held=False) == FIRST_PATIENCE


def test_a_gradient_that_was_held_once_is_no_reason_to_copy_for_ever() -> None:
    """The graph is captured with copies, and after some steps without them again."""
    gpu = FakeGpu(units=2)
    forward, backward = make_pair(gpu)
    weight = torch.randn(4)
    for _ in range(4):
        step((forward, backward), weight)
    _, kept = forward.run([torch.ones(4), weight])
    held = backward.run([kept, weight, torch.ones(4)])[0]  # type: ignore[list-item]
    del kept
    assert held is not None
    wanted = held.clone()
    for _ in range(FIRST_PATIENCE + 4):
        step((forward, backward), weight)
    assert torch.equal(held, wanted) and not gpu.races
    copies = [bool(each.kept.copied) for each in gpu.captures if each.role is backward.graph.role]
    assert (backward.num_captures, copies) == (3, [False])
    assert backward.num_launches == 3
