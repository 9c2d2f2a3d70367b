"""Random numbers and masks of a vector at once are those of Inductor, one element after the other."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

from apollo_compile.torch_bridge.vector_code import vectors_at_once
from tests.end_to_end.models import STRICT

AT_ONCE = "mul_epu32"
MASKS = ("const auto& mask", "const bool* from")


def test_numbers_are_the_same_to_the_bit() -> None:
    """Compare whole vectors and what is left, one seed after another, and as many as fill the counter's low half."""

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x), torch.nn.functional.dropout(x.double(), 0.3)

    found = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(2**40 + 5)
        with inductor_config.patch(fx_graph_cache=False):
            run = torch.compile(draw, backend="inductor", dynamic=False)
            with vectors_at_once() if is_ours else nullcontext():
                first, codes = run_and_get_code(run, torch.ones(37, 29))
            assert any(AT_ONCE in code for code in codes) is is_ours
        found.append([*first, *run(torch.ones(37, 29))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][0], found[0][2])
    assert 0 <= float(found[1][0].min()) < 0.01 and 0.99 < float(found[1][0].max()) < 1


def test_bodies_draw_them_so_and_inductor_does_not_afterwards() -> None:
    """In the code of segments; what Inductor compiles for others is its own."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5))
    with inductor_config.patch(fx_graph_cache=False):
        for backend, options in (("apollo", STRICT), ("inductor", {})):
            torch._dynamo.reset()
            _, codes = run_and_get_code(torch.compile(model, backend=backend, options=options), torch.randn(16, 32))
            assert any(AT_ONCE in code for code in codes) == (backend == "apollo"), backend


def _stored(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    positive = x > 0
    return positive, (positive & (y < 1)).logical_not(), x.isnan() | (y == 0), x.relu() <= 0


def _loaded(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.where(mask, x, y), x * mask, mask.to(x.dtype), (mask ^ (y > 0)).sum(-1), x.masked_fill(mask, -1.0)


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
def test_masks_are_the_same(dtype: torch.dtype) -> None:
    """Compare whole vectors and what is left, for elements of all widths, NaN, and masks that are apart in memory."""
    x, y = (5 * torch.randn(2, 37, 53)).to(dtype)
    if dtype in FLOATS:
        x[3, 5:20] = torch.nan
    mask = torch.rand(37, 53) > 0.5
    apart = mask.t().contiguous().t()
    cases = ((_stored, (x, y), MASKS[0]), (_loaded, (x, y, mask), MASKS[1]), (_loaded, (x, y, apart), ""))
    for call, inputs, text in cases:
        torch._dynamo.reset()
        with inductor_config.patch(fx_graph_cache=False), vectors_at_once():
            found, codes = run_and_get_code(torch.compile(call, dynamic=False), *inputs)
        assert any(text in code for code in codes)
        for one, other in zip(found, call(*inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_bodies_store_and_load_masks_so() -> None:
    """A network that gets no gradients, as the critics of an actor, keeps masks of its activations for the backward."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).requires_grad_(False)
    x = torch.randn(64, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, backend="apollo", options=STRICT)
        (found,), codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x).sum(), x))
    torch.testing.assert_close(found, expected)
    assert all(any(each in code for code in codes) for each in MASKS)
