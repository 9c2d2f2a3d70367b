"""Outputs of replays: copied for the user, saved for a backward, or the caller's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import BufferId, Role
from apollo_compile.target.target import Contract
from tests.builders import graph
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.run.test_execute import add_input, counts, executable_of, make_pair, two_towers, warm_up


def test_an_output_that_is_an_input_is_the_callers_own_tensor(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """A forward saves inputs for its backward; the copy that a replay reads is not what it returns."""
    made = add_input(graph((), (0,)), 0)
    made = replace(
        made, outputs=(BufferId(0), BufferId(2)), buffers=(replace(made.buffers[0], is_output=True), *made.buffers[1:])
    )
    contract = Contract(static_inputs=frozenset({1}), user_outputs=frozenset({1}))
    executable = executable_of(made, "AB", (torch.mul, torch.sin), gpu, contract=contract)
    held = []
    for _ in range(5):
        x = torch.randn(4)
        saved, out = executable.run([x, weight])
        held.append(saved)
        assert saved is x and torch.equal(out, (x * weight).sin())
    assert executable.num_replays == 3


def test_a_kept_view_of_a_parameter_is_no_reason_to_wait(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """Others hold the parameter all the time."""
    executable = two_towers(gpu, lambda x, weight: weight.view(2, 2), torch.sin, lambda w, s: w.reshape(4) + s)
    held = []
    for _ in range(5):
        held.append(executable.run([torch.randn(4), weight]))
    assert executable.num_replays == 3 and all(torch.equal(kept, weight.view(2, 2)) for _, kept in held)


def test_a_gradient_that_is_returned_twice_is_one_tensor(gpu: FakeGpu) -> None:
    """Then autograd copies it for one of two parameters; else both would be changed where one is."""
    forward, backward = make_pair(gpu, made=(1, 1))
    weight, held = torch.randn(4), []
    for _ in range(6):
        _, kept = forward.run([torch.randn(4), weight])
        one, other = backward.run([kept, weight, torch.randn(4)])
        assert one is other and one is not None
        held.append(one)
        del kept
    assert backward.num_replays == 3 and len({each.data_ptr() for each in held}) == 6


def test_an_output_that_is_saved_too_is_copied_for_the_user_alone(gpu: FakeGpu) -> None:
    """Such as a hyperbolic tangent at the end of a model: its backward reads what the user sees."""
    pair = forward, backward = make_pair(gpu, outputs=(0, 0))
    weight, held = torch.randn(4), []
    for _ in range(6):
        x, tangent = torch.randn(4), torch.randn(4)
        seen, kept = forward.run([x, weight])
        held.append((seen, x * weight))
        _, gradient = backward.run([kept, weight, tangent])
        assert torch.equal(gradient, x * weight - tangent)
        del kept, gradient
    assert [counts(each) for each in pair] == [(2, 1, 4), (2, 1, 4)]
    assert all(torch.equal(found, wanted) for found, wanted in held)


def test_what_a_backward_only_read_is_not_lent(gpu: FakeGpu) -> None:
    """A view of a tangent is one of memory that the next tangent is copied into."""
    forward, backward = make_pair(gpu, lambda kept, weight: kept * weight, lambda weight, tangent: tangent.view(2, 2))
    weight, held = torch.randn(4), []
    for _ in range(6):
        tangent = torch.randn(4)
        _, kept = forward.run([torch.randn(4), weight])
        held.append((backward.run([kept, weight, tangent])[1], tangent.view(2, 2)))
        del kept
    assert backward.num_replays == 4 and all(torch.equal(found, wanted) for found, wanted in held)


def test_an_input_whose_elements_share_memory_cannot_be_copied_into(gpu: FakeGpu) -> None:
    """The message says what to do."""
    executable = two_towers(gpu, strict=True)
    weight = warm_up(executable)
    with pytest.raises(UnsupportedGraphError, match=r"shape \(4,\) and strides \(0,\).*make it contiguous"):
        executable.run([torch.randn(1).expand(4), weight])


def test_an_output_whose_elements_share_memory_is_copied_out(gpu: FakeGpu) -> None:
    """Such as a mask for a whole batch; the memory that its elements share is what is copied."""
    executable = two_towers(gpu, torch.mul, torch.sin, lambda product, sine: product[:1].expand(3), strict=True)
    weight, held = torch.randn(4), []
    for _ in range(6):
        x = torch.randn(4)
        held.append((executable.run([x, weight])[0], (x * weight)[:1].expand(3)))
    assert executable.num_replays == 4
    for out, wanted in held:
        assert torch.equal(out, wanted) and out.stride() == (0,)


@pytest.mark.parametrize(
    "view",
    [
        lambda made: made.view(2, 2),
        lambda made: made[1:],
        lambda made: made[3:].to(torch.float32).view(torch.int32),
        lambda made: made[:0],
        lambda made: made.view(torch.complex64),
    ],
    ids=["all", "a part", "another type", "nothing", "larger elements"],
)
def test_outputs_that_share_memory_share_it_after_a_replay_too(gpu: FakeGpu, view: Callable[..., torch.Tensor]) -> None:
    """A graph without gradients may return a tensor and a view of it; who writes to one writes to the other."""
    made = replace(graph((), (0,), outputs=(0, 1)), role=Role.INFERENCE)
    executable = executable_of(made, "AB", (torch.sin, view), gpu, strict=True)
    held = []
    for _ in range(5):
        x = torch.randn(4)
        out, part = executable.run([x])
        assert out.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        held.append((out, part, x.sin()))
    assert executable.num_replays == 3
    for out, part, wanted in held:
        assert torch.equal(out, wanted) and torch.equal(part, view(wanted)) and part.stride() == view(wanted).stride()
