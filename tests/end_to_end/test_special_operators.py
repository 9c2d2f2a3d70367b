"""Operators that are more than a computation: run in segments as in eager, or handed to Inductor in words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from apollo_compile.session import registry
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.test_values import floats, same_call

Options = dict[str, Any]

operators = partial(pytest.mark.robustness, "Special operators")
"""Marks a test that docs/robustness.md counts."""


def both_ways(function: Any, inputs: tuple[Any, ...], options: Options) -> None:
    """Compare a function of tensors and its gradients with eager's."""
    own = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    expected, actual = function(*own), torch.compile(function, **options)(*own)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    wanted = [x for x in own if x.requires_grad]
    gradients = [torch.autograd.grad(out.square().sum(), wanted) for out in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


@torch.library.custom_op("apollo_tests::doubled_rows", mutates_args=())
def doubled_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of `x` twice."""
    return torch.cat([x, x])


doubled_rows.register_fake(lambda x: x.new_empty((2 * x.shape[0], *x.shape[1:])))
doubled_rows.register_autograd(lambda ctx, gradient: gradient[: len(gradient) // 2] + gradient[len(gradient) // 2 :])


@torch.library.custom_op("apollo_tests::count_up", mutates_args={"counter"})
def count_up(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Add one to `counter`; return `x` times what it was."""
    result = x * counter
    counter.add_(1)
    return result


count_up.register_fake(lambda counter, x: torch.empty_like(x))


@operators("custom operators")
def test_a_custom_operator_with_a_gradient_of_its_own(either: Options) -> None:
    """It runs in a segment, forward and backward."""
    both_ways(lambda x, y: doubled_rows((x @ y).tanh()) @ y, (floats(8, 8), floats(8, 8, seed=1)), either)


@operators("custom operators that write to their arguments")
def test_custom_operators_that_write_keep_their_order(either: Options) -> None:
    """Each sees what the one before it left; the buffer ends with eager's number."""

    def count(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        left = count_up(counter, x @ x)
        right = count_up(counter, x.T @ x)
        return left - 3 * right + count_up(counter, x)

    with torch.no_grad():
        same_call(count, (torch.ones(1), floats(8, 8)), either)


@operators("numbers read from tensors that are written to")
def test_a_number_is_read_before_its_tensor_is_written(either: Options) -> None:
    """Segments read it for themselves; what is read after the write is another number."""

    def scale(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = counter.item()
        left = (x @ x).tanh() * before
        counter.add_(1)
        return left - (x.T @ x).tanh() * counter.item() + before

    earlier = registry.compiled_models()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        same_call(scale, (torch.tensor(3), floats(8, 8)), either)
        same_call(scale, (torch.tensor(-2), floats(8, 8)), either)
    made = [model for model in registry.compiled_models() if model not in earlier]
    assert made and all(model.graphs and not model.fallbacks for model in made)


@torch.library.custom_op("apollo_tests::announce", mutates_args=())
def announce(x: torch.Tensor) -> torch.Tensor:
    """Remember that it was called."""
    announced.append(float(x.sum()))
    return x.clone()


announce.register_fake(torch.empty_like)
announced: list[float] = []


@operators("effect tokens")
def test_effect_tokens_fall_back_in_words(lanes: Options, info_log: pytest.LogCaptureFixture) -> None:
    """Segments cannot order them: one line says so, and the effects happen in eager's order."""
    handle = _register_effectful_op(announce._opoverload, _EffectType.ORDERED)
    try:
        announced.clear()
        with torch.no_grad():
            same_call(lambda x, y: announce(x @ y) + announce(y @ x).T, (floats(4, 4), floats(4, 4, seed=1)), lanes)
    finally:
        handle.destroy()
    assert announced[2:] == pytest.approx(announced[:2], rel=1e-4)
    assert "carries an effect token" in info_log.text


def _choose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x, y: (x @ y).sin(), lambda x, y: (x - y).tanh(), (x, y)) @ y


@operators("torch.cond")
def test_a_branch_that_depends_on_a_value_is_taken_both_ways(lanes: Options) -> None:
    """One graph holds both branches; which one runs is decided in every call."""
    with torch.no_grad():
        for sign in (1, -1):
            same_call(_choose, (floats(8, 8).abs() * sign, floats(8, 8, seed=1)), lanes)


@operators("torch.cond, with gradients")
def test_gradients_are_those_of_the_branch_that_was_taken(either: Options) -> None:
    """The backward decides as the forward did."""
    for sign in (1, -1):
        both_ways(_choose, (floats(8, 8).abs() * sign, floats(8, 8, seed=1)), either)


@operators("scan, with gradients")
def test_a_scan_carries_its_state_forwards_and_its_gradient_back(uncompiled: Options) -> None:
    """Operator by operator: Inductor, alone too, refuses the loop, whose graph reads a number."""

    def carry(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last, made = scan(lambda state, row: ((state @ y).tanh() + row, state * 2), x[:1] @ y, x.unsqueeze(1))
        return last @ y + made.sum(0)

    both_ways(carry, (floats(8, 8), floats(8, 8, seed=1)), uncompiled)


@operators("map, with gradients")
def test_a_mapped_function_has_eagers_gradients(uncompiled: Options) -> None:
    """Also of what all calls read; operator by operator, as a scan."""

    def apply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return map_rows(lambda row: (row @ y).tanh(), x) @ y

    both_ways(apply, (floats(8, 8), floats(8, 8, seed=1)), uncompiled)


@operators("torch.while_loop")
def test_a_loop_whose_length_depends_on_a_value(lanes: Options) -> None:
    """It ends after as many rounds as in eager."""

    def repeat(x: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
        _, result = while_loop(lambda i, x: i > 0, lambda i, x: (i - 1, (x @ x).tanh()), (rounds, x))
        return result @ x

    with torch.no_grad():
        for rounds in (0, 3):
            same_call(repeat, (floats(4, 4), torch.tensor(rounds)), lanes)


@operators("higher-order operators with a graph inside")
def test_a_region_that_is_compiled_once_and_called_twice(either: Options) -> None:
    """`nested_compile_region` leaves calls of an inner graph in the outer one, forward and backward."""

    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    both_ways(lambda x, w: layer(layer(x, w), w) @ w, (floats(8, 8), floats(8, 8, seed=1)), either)


@operators("flex_attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # the reference
def test_attention_with_a_score_function_of_ones_own(lanes: Options) -> None:
    """A higher-order operator whose argument is a graph."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, key, value, score_mod=lambda score, b, h, q, k: score - (q - k).abs())

    with torch.no_grad():
        same_call(attend, tuple(floats(1, 2, 16, 16, seed=seed) for seed in range(3)), lanes)


@operators("flex_attention, with gradients")
def test_attention_with_a_score_function_refuses_gradients_in_the_words_of_torch(lanes: Options) -> None:
    """On a CPU it has none, in eager neither."""
    inputs = tuple(floats(1, 2, 16, 16, seed=seed).requires_grad_() for seed in range(3))
    for function in (flex_attention, torch.compile(flex_attention, **lanes)):
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            function(*inputs)


def _record(own: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        own.seen.lerp_(x.mean(0), 0.5)
        own.steps += 1
    out = (x @ y) * own.seen.clone()
    with torch.no_grad():
        own.seen[: int(len(own.seen) / 2)] = 1.0
    return out + own.seen


@operators("buffers written several times in a forward")
def test_a_buffer_that_is_written_and_read_in_turns(either: Options) -> None:
    """Readers see the value of their place in the program, and the buffer ends with the last one."""
    expected, actual = (Wrapped(_record, seen=torch.zeros(8), steps=torch.tensor(0)) for _ in range(2))
    run = torch.compile(actual, **either)
    x, y = floats(8, 8).requires_grad_(), floats(8, 8, seed=1)
    for _ in range(3):
        outputs = run(x, y), expected(x, y)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(output.square().sum(), x) for output in outputs]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(actual.named_buffers()), dict(expected.named_buffers()))


@operators("windows of a pooling that overhang")
@pytest.mark.parametrize("dimensions", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("window", "padding"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.soak)])
def test_averages_over_the_end_of_an_image_have_their_own_divisor(
    window: int, padding: int, dimensions: int, lanes: Options
) -> None:
    """In two and three dimensions; Inductor alone divides gradients by the size of a whole window."""
    average = functional.avg_pool2d if dimensions == 2 else functional.avg_pool3d

    def pool(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        pooled = average(left, window, 2, padding, ceil_mode=True)
        return pooled.sin().sum() * average(right, window, 2, padding, ceil_mode=True).cos()

    side = 2 * window + 1 - padding  # the last window overhangs
    shape = (2, 2, *[side] * dimensions)
    both_ways(pool, (floats(*shape), floats(*shape)), lanes)


@operators("transposed values that are added at an index")
def test_transposed_values_are_added_where_the_index_says(lanes: Options) -> None:
    """Inductor alone, on several threads, adds them elsewhere or behind the tensor."""
    where = torch.tensor([0])

    def add(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        put = table.index_put((where,), x.t().unsqueeze(0) * 2, accumulate=True)
        return put + table.index_add(0, where, x.t().unsqueeze(0) * 3)

    both_ways(add, (floats(16, 16), floats(4, 16, 16)), lanes)
