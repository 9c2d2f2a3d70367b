"""Tensors that may be under way: what waits for them, and what does not."""

from __future__ import annotations

import torch

from apollo_compile.distributed.deploy.arriving import Arriving, arrived


def test_shape_and_type_are_known_before_values_are_waited_for() -> None:
    """Values are waited for once, and what is computed of them is plain."""
    waits: list[str] = []
    plain = torch.randn(3, 4)
    like = torch.empty(3, 4, device="meta", requires_grad=True)
    found = Arriving(like, [lambda: waits.append("waited")], plain)
    assert (found.shape, found.size(1), found.dim(), found.ndim, len(found)) == ((3, 4), 4, 2, 2, 3)
    assert (found.numel(), found.dtype, found.requires_grad) == (12, torch.float32, True)
    assert not waits
    doubled = found * 2
    assert type(doubled) is torch.Tensor and torch.equal(doubled, plain * 2)
    assert arrived({"features": [found]})["features"][0] is plain
    assert waits == ["waited"]


def test_a_tensor_that_a_wait_makes_is_there_after_it() -> None:
    """As for a call that begins when its output is used."""

    def begin() -> None:
        found.plain, found.waits = torch.ones(2), [lambda: order.append("sent")]
        order.append("begun")

    order: list[str] = []
    found = Arriving(torch.empty(2, device="meta"), [begin])
    assert torch.equal(found + found, torch.full((2,), 2.0))
    assert order == ["begun", "sent"]
