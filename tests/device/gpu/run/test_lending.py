"""Gradients of a replayed backward: lent while training releases them before a forward, else copied out for good."""

from __future__ import annotations

import weakref

import pytest
import torch

from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.ir import Role
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.run.test_execute import counts, make_pair, step

Pair = tuple[CudaExecutable, CudaExecutable]
Gradients = list[torch.Tensor]


def lends(gpu: FakeGpu) -> bool:
    """Whether the backwards that are captured lend their gradients, all of them or none."""
    (found,) = {not each.kept.copied for each in gpu.captures if each.role is Role.BACKWARD}
    return found


def train(pair: Pair, steps: int, *, zeroed: str, weight: torch.Tensor, held: Gradients | None = None) -> Gradients:
    """Take so many steps, add their gradients up as autograd does, and check the sums; return the last ones."""
    forward, backward = pair
    held = [] if held is None else held
    wanted = [each.clone() for each in held]
    for _ in range(steps):
        x, tangent = torch.randn(4), torch.randn(4)
        if zeroed == "before the forward":
            held.clear()
        _, kept = forward.run([x, weight])
        if zeroed == "after the forward":
            held.clear()
        if zeroed == "in place":
            for each in held:
                each.zero_()
        made = [x * weight * weight, x * weight - tangent]
        has_sums = bool(held) and zeroed == "never"
        wanted = [a + b for a, b in zip(wanted, made, strict=True)] if has_sums else made
        gradients = backward.run([kept, weight, tangent])
        del kept
        if not held:
            held += gradients
        else:
            for total, gradient in zip(held, gradients, strict=True):
                total += gradient
            del total, gradient
        del gradients
        torch.testing.assert_close(held, wanted, rtol=0, atol=0)
    return held


def test_gradients_that_are_zeroed_before_the_forward_are_lent(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """Nothing is copied but the inputs, the loss and the tangent."""
    pair = forward, backward = make_pair(gpu)
    held = train(pair, 5, zeroed="before the forward", weight=weight)
    gpu.log.clear()
    train(pair, 1, zeroed="before the forward", weight=weight, held=held)
    assert gpu.log == [("copy", "1"), ("replay",), ("copy", "1"), ("copy", "1"), ("replay",)]
    assert lends(gpu) and forward.shared.why_copied is None
    assert counts(forward) == counts(backward) == (2, 1, 4) and not gpu.races


@pytest.mark.parametrize("zeroed", ["after the forward", "in place", "never"])
def test_gradients_that_are_in_use_when_a_forward_begins_are_copied_out(gpu: FakeGpu, zeroed: str) -> None:
    """One step is launched, both graphs are captured again, and from then on every step is replayed."""
    pair = forward, backward = make_pair(gpu)
    weight = torch.randn(4)
    held = train(pair, 4, zeroed="before the forward", weight=weight)
    train(pair, 8, zeroed=zeroed, weight=weight, held=held)
    assert not lends(gpu)
    assert counts(forward) == counts(backward) == (2 + 1, 2, 2 + 7) and not gpu.races


@pytest.mark.parametrize("zeroed", ["in place", "never"])
def test_gradients_that_are_added_to_those_of_a_launched_run_are_lent(gpu: FakeGpu, zeroed: str) -> None:
    """Only the sum is held, and it is in memory of its own."""
    pair = forward, backward = make_pair(gpu)
    train(pair, 8, zeroed=zeroed, weight=torch.randn(4))
    assert lends(gpu) and counts(forward) == counts(backward) == (2, 1, 6) and not gpu.races


def test_a_gradient_that_was_held_once_is_copied_out_for_good(gpu: FakeGpu, info_log: pytest.LogCaptureFixture) -> None:
    """What was lent stays as it was, one line says why, and the memory of the old graphs ends with it."""
    pair = _, backward = make_pair(gpu)
    weight = torch.randn(4)
    held = train(pair, 4, zeroed="before the forward", weight=weight)
    kept_for_long = held[0]
    assert lends(gpu)
    wanted, old = kept_for_long.clone(), weakref.ref(gpu.recordings[0].pool)
    gpu.recordings.clear()
    train(pair, 20, zeroed="before the forward", weight=weight, held=held)
    assert torch.equal(kept_for_long, wanted) and not lends(gpu)
    assert counts(backward) == (3, 2, 2 + 19) and not gpu.races
    (line,) = [each.message for each in info_log.records if "gradients" in each.message]
    assert "a gradient is in use" in line and "call zero_grad before the forward" in line
    assert old() is not None and old() is not gpu.recordings[0].pool
    del kept_for_long
    assert old() is None


def test_variants_of_a_model_copy_out_together(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """They have one memory pool: what one of them lends, another one would overwrite."""
    pairs = [make_pair(gpu, variant="first")]
    pairs.append(make_pair(gpu, shared=pairs[0][0].shared, variant="second"))
    held = train(pairs[0], 4, zeroed="before the forward", weight=weight)
    held = train(pairs[1], 4, zeroed="after the forward", weight=weight, held=held)
    train(pairs[0], 4, zeroed="after the forward", weight=weight, held=held)
    assert not lends(gpu) and [each.num_replays for _, each in pairs] == [2 + 4, 2] and not gpu.races


def test_with_other_ranks_gradients_are_copied_out(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Communication reads them on streams of its own, also where it begins after a capture."""
    pair = _, backward = make_pair(gpu)
    weight = torch.randn(4)
    train(pair, 4, zeroed="before the forward", weight=weight)
    assert lends(gpu)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    train(pair, 4, zeroed="before the forward", weight=weight)
    assert not lends(gpu) and counts(backward) == (2, 2, 6)


def test_gradients_of_a_forward_that_was_launched_are_no_reason_to_copy(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """Two forwards before two backwards: the second of each is launched, into fresh memory, and overwrites nothing."""
    pair = forward, backward = make_pair(gpu)
    step(pair, weight, times=4)
    for _ in range(3):
        xs, tangent = [torch.randn(4), torch.randn(4)], torch.randn(4)
        saved = [kept for x in xs for kept in forward.run([x, weight])[1:]]
        gradients = [backward.run([kept, weight, tangent])[1] for kept in saved]
        assert len(gradients) == 2
        for x, gradient in zip(xs, gradients, strict=True):
            assert torch.equal(gradient, x * weight - tangent)
        del saved, gradients, gradient
    assert counts(backward) == (2 + 3, 1, 2 + 3) and len(gpu.recordings) == 2
