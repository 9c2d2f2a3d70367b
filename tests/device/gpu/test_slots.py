"""Slots for gradients that live on while the next forward runs, as when they are zeroed before the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from apollo_compile.device.gpu import slots
from apollo_compile.device.gpu.execute import CudaExecutable
from apollo_compile.device.gpu.lending import FIRST_PATIENCE
from apollo_compile.device.gpu.memory import ModelMemory
from apollo_compile.device.target import CompiledBody, Contract
from apollo_compile.ir import Role
from apollo_compile.torch_bridge.storages import are_gone, storages_of
from tests.builders import graph, plan
from tests.device.gpu.arena import SEGMENT_BYTES
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_execute import add_input, body, counts, make_pair, two_towers
from tests.device.gpu.test_launch import program_of

Pair = tuple[CudaExecutable, CudaExecutable]
Gradients = list[torch.Tensor | None]


@pytest.fixture
def gpu() -> FakeGpu:
    """Make a device of two units."""
    return FakeGpu(units=2)


def zero_before_backward(pair: Pair, weight: torch.Tensor, steps: int, held: Gradients | None = None) -> Gradients:
    """Take so many steps, whose gradients live until the next backward, and check them; return the last ones."""
    forward, backward = pair
    held = [] if held is None else held
    for _ in range(steps):
        x, tangent = torch.randn(4), torch.randn(4)
        before = [None if each is None else each.clone() for each in held]
        _, kept = forward.run([x, weight])
        assert kept is not None
        assert all(torch.equal(*both) for both in zip(held, before, strict=True))  # type: ignore[arg-type]
        held.clear()
        held += backward.run([kept, weight, tangent])
        del kept
        first, second = held
        assert first is not None and torch.equal(first, x * weight * weight)
        assert second is not None and torch.equal(second, x * weight - tangent)
        del first, second
    return held


def slots_of(gpu: FakeGpu) -> list[torch.Tensor]:
    """Return the slots of the CUDA graphs that are alive."""
    return [tensor for captured in gpu.captures for tensor in captured.slots.tensors.values()]


def test_gradients_that_are_zeroed_before_the_backward_are_in_slots(gpu: FakeGpu) -> None:
    """Every step is replayed, and nothing is allocated or copied outside of the CUDA graph but inputs and the loss."""
    pair = forward, backward = make_pair(gpu)
    weight = torch.randn(4)
    held = zero_before_backward(pair, weight, 4)
    addresses = [each.data_ptr() for each in held if each is not None]
    assert addresses == [each.data_ptr() for each in slots_of(gpu)]
    gpu.log.clear()
    held = zero_before_backward(pair, weight, 1, held)
    assert gpu.log == [("copy", "1"), ("replay",), ("copy", "1"), ("copy", "1"), ("replay",)]
    assert addresses == [each.data_ptr() for each in held if each is not None]
    assert counts(forward) == counts(backward) == (2, 1, 3) and not gpu.races


def chain(gpu: FakeGpu, length: int, size: int) -> Pair:
    """Return a forward that keeps its product, and a backward that makes a gradient from the one before, and so on."""
    shared = ModelMemory()
    forward = two_towers(gpu, shared=shared)
    made = replace(graph((), *((i,) for i in range(length - 1)), outputs=range(length)), role=Role.BACKWARD)

    def halve(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        value = inputs.pop().mean()
        return [torch.full((size,), 0.5) * value]

    backward = CudaExecutable(
        program=program_of(made, plan(made, "A" * length)),
        graph=made,
        bodies=[CompiledBody(function=halve)] * length,
        gpu=gpu,
        contract=Contract(static_inputs=frozenset({0}), user_outputs=frozenset(range(length))),
        shared=shared,
    )
    return forward, backward


def test_memory_of_a_gradient_is_used_again_within_the_backward() -> None:
    """So the pool holds one of twelve, and what a copy works with; copied out, it holds all of them."""
    sizes = {}
    for is_cleared in (True, False):
        gpu = FakeGpu(units=2)
        forward, backward = chain(gpu, 12, SEGMENT_BYTES // 4)
        if not is_cleared:
            forward.shared.lending.forbid()  # as with other ranks
        weight, held = torch.randn(4), []
        for _ in range(5):
            _, kept = forward.run([torch.randn(4), weight])
            assert kept is not None
            if is_cleared:
                held.clear()
            value = kept.mean()
            held.append((backward.run([kept]), value))
            del kept
        for gradients, value in held:
            assert [float(each[-1]) for each in gradients if each is not None] == pytest.approx(
                [float(value) / 2**number for number in range(1, 13)]
            )
        assert counts(backward) == (2, 1, 3)
        sizes[is_cleared] = sum(segment.num_bytes for segment in gpu.recordings[0].pool.segments)
    assert sizes[False] - sizes[True] >= 8 * SEGMENT_BYTES


def test_a_slot_in_use_is_not_overwritten(gpu: FakeGpu) -> None:
    """That backward is launched, and gradients are copied out until they are found released again."""
    pair = _, backward = make_pair(gpu)
    weight = torch.randn(4)
    held = zero_before_backward(pair, weight, 4)
    kept_for_long = held[0]
    assert kept_for_long is not None
    wanted = kept_for_long.clone()
    zero_before_backward(pair, weight, 3, held)
    assert counts(backward)[:2] == (3, 2) and slots_of(gpu) == []
    held = zero_before_backward(pair, weight, FIRST_PATIENCE, held)
    assert torch.equal(kept_for_long, wanted)
    assert counts(backward)[:2] == (4, 3) and len(slots_of(gpu)) == 2
    assert not gpu.races


def test_variants_share_slots_which_end_with_the_last_of_them(gpu: FakeGpu) -> None:
    """The caller's gradients live on."""
    pairs = [make_pair(gpu, variant="first")]
    pairs.append(make_pair(gpu, shared=pairs[0][0].shared, variant="second"))
    weight, held = torch.randn(4), []
    for pair in (*pairs, *pairs):
        held = zero_before_backward(pair, weight, 4, held)
    assert [counts(backward) for _, backward in pairs] == [(2, 1, 6), (2, 1, 6)]
    assert len(slots_of(gpu)) == 4 and len({each.data_ptr() for each in slots_of(gpu)}) == 2
    storages = storages_of(slots_of(gpu))
    wanted = [each.clone() for each in held if each is not None]
    pairs[0][1].release()
    assert len(slots_of(gpu)) == 2
    pairs[1][1].release()
    assert slots_of(gpu) == [] and all(map(torch.equal, held, wanted))
    held.clear()
    assert are_gone(storages)


def test_a_rehearsal_does_not_write_to_slots_in_use(gpu: FakeGpu) -> None:
    """They are those of another variant, whose gradients are accumulated for once."""
    pairs = [make_pair(gpu, variant="first")]
    pairs.append(make_pair(gpu, shared=pairs[0][0].shared, variant="second"))
    weight = torch.randn(4)
    zero_before_backward(pairs[1], weight, 2, zero_before_backward(pairs[0], weight, 4))
    held = zero_before_backward(pairs[0], weight, 1)
    wanted = [each.clone() for each in held if each is not None]
    zero_before_backward(pairs[1], weight, 1)
    assert all(map(torch.equal, held, wanted)) and counts(pairs[1][1]) == (3, 1, 0)


def test_gradients_that_share_memory_have_no_slot(gpu: FakeGpu) -> None:
    """They are copied out, and share it then; the others have one."""
    forward, _ = make_pair(gpu)
    made = replace(add_input(graph((), (0,), (0,), outputs=(0, 1, 2)), 0), role=Role.BACKWARD)
    functions = (torch.mul, lambda product: product.view(2, 2), torch.sin)
    backward = CudaExecutable(
        program=program_of(made, plan(made, "ABA")),
        graph=made,
        bodies=[body(function) for function in functions],
        gpu=gpu,
        contract=Contract(static_inputs=frozenset({0, 1}), user_outputs=frozenset({0, 1, 2})),
        shared=forward.shared,
    )
    weight, held = torch.randn(4), []
    for _ in range(5):
        x = torch.randn(4)
        _, kept = forward.run([x, weight])
        assert kept is not None
        held.clear()
        held += backward.run([kept, weight])
        del kept
        product, view, sine = held
        assert product is not None and view is not None and sine is not None
        assert torch.equal(product, x * weight * weight) and torch.equal(sine, product.sin())
        assert torch.equal(view.view(4), product) and view.data_ptr() == product.data_ptr()
        del product, view, sine
    assert counts(backward) == (2, 1, 3) and len(slots_of(gpu)) == 1


def test_too_little_memory_for_slots_ends_captures(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As anything that a rehearsal finds no memory for; training goes on."""

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(slots, "target_for", fail)
    pair = forward, backward = make_pair(gpu)
    zero_before_backward(pair, torch.randn(4), 6)
    assert not forward.may_capture and not backward.may_capture
    assert backward.capture_error == "OutOfMemoryError: CUDA out of memory"
    assert counts(backward) == (6, 1, 0) and list(gpu.captures) == []
