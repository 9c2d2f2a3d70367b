"""Storages that a graph frees and fills, as FSDP does with parameters: values and sizes are eager's in every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from apollo_compile.session import registry
from tests.end_to_end.models import Tower
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.test_values import floats

Options = dict[str, Any]
Function = Callable[..., Any]
WIDTH = 64

storages = partial(pytest.mark.robustness, "Special operators")
"""Marks a test that docs/robustness.md counts."""


def freed_towers(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute with two towers over an input that is freed when both have read it."""
    a, b = self.a(x), self.b(x.cos())
    x.untyped_storage().resize_(0)
    return a * b


def empty_square() -> torch.Tensor:
    """Return a weight without memory."""
    tensor = torch.empty(WIDTH, WIDTH)
    tensor.untyped_storage().resize_(0)
    return tensor


def towers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute two things with a weight."""
    return ((x @ weight).tanh() @ weight) * ((x.cos() @ weight.t()).tanh() @ weight)


def fill(weight: torch.Tensor, full: torch.Tensor) -> None:
    """Give a weight memory and values."""
    weight.untyped_storage().resize_(weight.nbytes)
    weight.copy_(full)


def use_and_free(x: torch.Tensor, weight: torch.Tensor, *freed: torch.Tensor) -> torch.Tensor:
    """Compute with a weight, then free what is no longer needed."""
    result = towers(x, weight)
    for each in freed:
        each.untyped_storage().resize_(0)
    return result


def fill_before_use(weight: torch.Tensor, full: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Leave the weight filled."""
    fill(weight, full)
    return towers(x, weight)


def fill_use_and_free(weight: torch.Tensor, full: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Leave the weight as it came, without memory."""
    fill(weight, full)
    return use_and_free(x, weight, weight)


def free_what_was_made(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Free a value on the way."""
    made = x @ weight
    return use_and_free(made, weight, made) + x


def same_calls(
    function: Function, make_inputs: Callable[[int], tuple[torch.Tensor, ...]], num_calls: int, options: Options
) -> None:
    """Call `function` in eager and compiled; results, inputs and the sizes of their storages must agree."""
    run = torch.compile(function, **options)
    with torch.no_grad():
        for seed in range(num_calls):
            eager_inputs, own_inputs = make_inputs(seed), make_inputs(seed)
            torch.testing.assert_close(run(*own_inputs), function(*eager_inputs), rtol=1e-4, atol=1e-4)
            for own, eager in zip(own_inputs, eager_inputs, strict=True):
                assert own.untyped_storage().nbytes() == eager.untyped_storage().nbytes()
                if eager.untyped_storage().nbytes():
                    torch.testing.assert_close(own, eager)


def square(seed: int) -> torch.Tensor:
    """Return random numbers, as large as those of a weight."""
    return floats(WIDTH, WIDTH, seed=seed) / 8


def squares(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two of them."""
    return square(seed), square(seed + 1)


CASES: dict[str, tuple[Function, Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "free after use": (lambda x, weight: use_and_free(x, weight, weight, x), squares),
    "fill before use": (fill_before_use, lambda seed: (empty_square(), *squares(seed))),
    "fill, use and free": (fill_use_and_free, lambda seed: (empty_square(), *squares(seed))),
    "free and fill": (
        lambda weight, full, x: use_and_free(x, weight, weight) + fill_before_use(weight, full, x),
        lambda seed: (square(seed + 2), *squares(seed)),
    ),
    "free what is shared": (  # by two views of it
        lambda x, transposed, weight: x.clone() + use_and_free(transposed, weight, x),
        lambda seed: (lambda x: (x, x.t(), square(seed + 1)))(square(seed)),
    ),
    "free what was made": (free_what_was_made, squares),
}


@storages("storages that are freed and filled")
@pytest.mark.parametrize("case", CASES)
def test_storages_are_freed_and_filled_in_the_order_of_the_program(case: str, either: Options) -> None:
    """Nothing reads a storage before it is filled or after it is freed, also not through other views of it."""
    same_calls(*CASES[case], 3, either)


@storages("inputs that two towers read and that are freed then")
def test_an_input_is_freed_when_both_towers_have_read_it(either: Options) -> None:
    """What frees it waits for both; each has a lane."""
    same_calls(Wrapped(freed_towers, a=Tower(WIDTH, 2), b=Tower(WIDTH, 2)), lambda seed: (square(seed),), 10, either)


@pytest.mark.soak
@pytest.mark.parametrize("bodies", ["eager", "native", "default options"])
def test_an_input_is_freed_in_time_in_200_calls(bodies: str, lanes: Options) -> None:
    """Wide towers, on two lanes, and as they run by default."""
    forced = {**lanes, "options": {**lanes["options"], "runtime.bodies": bodies}}
    options = {"backend": "apollo"} if bodies == "default options" else forced
    model = Wrapped(freed_towers, a=Tower(512, 2), b=Tower(512, 2))
    same_calls(model, lambda seed: (floats(64, 512, seed=seed),), 200, options)


@storages("storages that are freed while gradients flow")
@pytest.mark.parametrize("shares_memory", [False, True])
def test_what_the_backward_needs_is_made_before_its_input_is_freed(shares_memory: bool, either: Options) -> None:
    """It is not computed again from memory that is gone, though that would be cheap."""
    weight = square(7)

    def forget(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = (x.exp() @ weight).tanh() * (y.exp() @ weight).sigmoid()
        with torch.no_grad():
            x.untyped_storage().resize_(0)
        return result

    def play(run: Function) -> list[Any]:
        seen = []
        for seed in range(3):
            x = square(seed).requires_grad_()
            y = (x.detach().t() if shares_memory else square(seed + 1)).requires_grad_()
            result = run(x, y)
            assert x.untyped_storage().nbytes() == 0
            seen += [result.detach(), *torch.autograd.grad(result.sum(), (x, y))]
        return seen

    torch.testing.assert_close(play(torch.compile(forget, **either)), play(forget), rtol=1e-4, atol=1e-4)


@pytest.mark.soak
def test_only_what_resizes_keeps_python(lanes: Options) -> None:
    """Inductor's C++ wrapper has no code for it; segments that compute are native."""
    with torch.no_grad():
        torch.compile(Wrapped(freed_towers, a=Tower(WIDTH, 2), b=Tower(WIDTH, 2)), **lanes)(square(0))
    (graph,) = registry.compiled_models()[-1].graphs
    bodies = zip(graph.compilation.partition.bodies, graph.bodies, strict=True)
    assert [body.name for body, code in bodies if code.entry_address is None] == ["~resize_storage_bytes_"]
