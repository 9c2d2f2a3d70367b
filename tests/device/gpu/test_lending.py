"""Whether gradients are lent: until one is held, and again once they are released."""

from __future__ import annotations

import pytest
import torch

from apollo_compile.device.gpu.lending import FIRST_PATIENCE, Lending, Lifetime
from apollo_compile.ir import Role
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_execute import counts, make_pair, step

FORWARD, BACKWARD, SUM, LONGER = Lifetime


class Loop:
    """A training loop whose gradients live for some time."""

    def __init__(self) -> None:
        self.lending = Lending()
        self._held: list[torch.Tensor] = []
        self._is_lent = False

    def runs_until(self, wanted: Lifetime, *, life: Lifetime, most: int = 1000) -> int:
        """Return after how many runs gradients are expected to live as long as `wanted`, if they live for `life`."""
        for number in range(most):
            if life is FORWARD:
                self._held.clear()
            self.lending.changes(Role.FORWARD)
            if self._is_lent and self._held:
                self.lending.refuse(lambda: not self._held)
            if life is BACKWARD:
                self._held.clear()
            self.lending.changes(Role.BACKWARD)
            if self.lending.lifetime is wanted:
                return number
            gradient, lends = torch.ones(1), self.lending.lends()
            if life is not SUM or not self._held:
                self._held.append(gradient)
                self._is_lent = lends
            if not lends:
                self.lending.note([gradient, None])
            del gradient
        return most


def test_gradients_are_lent_again_after_some_runs_in_which_they_were_released() -> None:
    """Each time that was wrong, after twice as many."""
    loop = Loop()
    assert loop.lending.lends() and not loop.lending.changes(Role.FORWARD)
    for patience in (FIRST_PATIENCE, 2 * FIRST_PATIENCE, 4 * FIRST_PATIENCE):
        loop.lending.refuse()
        assert not loop.lending.lends() and loop.lending.lifetime is BACKWARD
        assert loop.runs_until(FORWARD, life=FORWARD) == patience


def test_gradients_that_are_always_held_are_asked_about_less_and_less() -> None:
    """Whether others are added to them is tried, and found wrong; they are never lent otherwise."""
    loop, tries = Loop(), []
    loop.runs_until(LONGER, life=LONGER)
    for _ in range(3):
        tries.append(loop.runs_until(SUM, life=LONGER))
        loop.runs_until(LONGER, life=LONGER)
    assert tries == sorted(tries) and tries[-1] >= 3 * FIRST_PATIENCE
    assert loop.runs_until(FORWARD, life=LONGER) == 1000


def test_what_must_not_be_lent_never_is() -> None:
    """Even if it is released."""
    loop = Loop()
    loop.lending.forbid()
    assert loop.lending.lifetime is LONGER
    for life in (FORWARD, BACKWARD, SUM):
        assert loop.runs_until(life, life=life) == 1000 and not loop.lending.lends()


@pytest.mark.parametrize("life", Lifetime)
def test_gradients_that_are_held_before_anything_is_captured_are_treated_so_at_once(life: Lifetime) -> None:
    """Those of runs on lanes tell what training does with them."""
    loop = Loop()
    assert loop.runs_until(life, life=life) == (0, 1, 1, 3)[life]
    if life is not FORWARD:
        assert loop.runs_until(FORWARD, life=FORWARD) >= FIRST_PATIENCE


def test_gradients_are_lent_while_copies_live_that_they_are_added_to() -> None:
    """The first that lives on is a copy, also if it has lived since the first run."""
    lending, total = Lending(), torch.ones(1)
    lending.note([total])
    assert not lending.changes(Role.FORWARD) or lending.lifetime is BACKWARD
    lending.changes(Role.BACKWARD)
    assert lending.lifetime is SUM and lending.lends()
    lending.note([torch.ones(1)])  # as of a run on lanes
    assert lending.lends()
    del total
    assert not lending.lends()


def test_a_shorter_life_that_was_wrong_is_what_was_expected_before() -> None:
    """Gradients that were accumulated are no reason for slots if they are for once released early."""
    loop = Loop()
    loop.runs_until(SUM, life=SUM)
    loop.runs_until(FORWARD, life=FORWARD)
    loop.lending.refuse()
    assert loop.lending.lifetime is SUM
    assert loop.runs_until(BACKWARD, life=BACKWARD) == 2 * FIRST_PATIENCE
    assert loop.runs_until(FORWARD, life=FORWARD) == 2 * FIRST_PATIENCE
    loop.lending.refuse()
    assert loop.lending.lifetime is BACKWARD


def test_a_gradient_that_was_held_once_is_no_reason_to_copy_for_ever() -> None:
    """They are copied out, and after some steps lent again, by the same CUDA graph."""
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
    assert (backward.num_captures, copies) == (2, [False])
    assert backward.num_launches == 3


def test_of_gradients_that_are_added_up_the_first_is_copied_and_others_are_lent() -> None:
    """Whether the sum is let go or zeroed in place; all by one CUDA graph."""
    gpu = FakeGpu(units=2)
    forward, backward = make_pair(gpu)
    weight, copies, sums, wanted = torch.randn(4), [], [torch.zeros(4)] * 2, [torch.zeros(4)] * 2
    for number in range(16):
        x, tangent = torch.randn(4), torch.randn(4)
        if number == 8:
            sums.clear()
        gpu.log.clear()
        _, kept = forward.run([x, weight])
        assert kept is not None
        gradients = backward.run([kept, weight, tangent])
        del kept
        if number in (0, 8):
            sums, wanted = gradients, [torch.zeros(4)] * 2
        else:
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
            del gradient
        del gradients
        wanted = [wanted[0] + x * weight * weight, wanted[1] + x * weight - tangent]
        torch.testing.assert_close(sums, wanted)
        copies.append(gpu.log[-1] == ("copy", "2"))
    assert [number for number, is_copied in enumerate(copies) if is_copied] == [8]
    assert counts(forward) == counts(backward) == (2, 1, 14) and not gpu.races
