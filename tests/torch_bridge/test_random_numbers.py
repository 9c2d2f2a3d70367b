"""Random numbers of a vector at once are those of Inductor, one after the other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch._inductor.config as inductor_config  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402

from apollo_compile.torch_bridge.random_numbers import numbers_at_once  # noqa: E402
from tests.end_to_end.models import STRICT  # noqa: E402

AT_ONCE = "mul_epu32"


def test_numbers_are_the_same_to_the_bit() -> None:
    """Whole vectors and what is left, one seed after another, and as many as fill the counter's low half."""

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x), torch.nn.functional.dropout(x.double(), 0.3)

    found = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(2**40 + 5)
        with inductor_config.patch(fx_graph_cache=False):
            run = torch.compile(draw, backend="inductor", dynamic=False)
            if is_ours:
                with numbers_at_once():
                    first, codes = run_and_get_code(run, torch.ones(37, 29))
                assert any(AT_ONCE in code for code in codes)
            else:
                first = run(torch.ones(37, 29))
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
            run = torch.compile(model, backend=backend, options=options)
            _, codes = run_and_get_code(run, torch.randn(16, 32))
            assert any(AT_ONCE in code for code in codes) == (backend == "apollo"), backend
