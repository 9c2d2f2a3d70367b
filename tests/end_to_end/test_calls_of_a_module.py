"""Towers whose seeds of dropout are drawn at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.end_to_end.models import STRICT, EmbeddedTowers, assert_same_training, train


@pytest.mark.slow
def test_towers_with_dropout_draw_the_numbers_of_inductor() -> None:
    """With compiled bodies, whichever segment draws the seeds."""
    model, inputs = EmbeddedTowers(dropout=0.4), (torch.arange(512) % 100, torch.arange(512) % 90)

    def loss_of(run: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return run(*inputs).square().mean() / 1000  # or training diverges, and rounding with it

    inductor = train(model, loss_of, steps=2, backend="inductor")
    apollo = train(model, loss_of, steps=2, backend="apollo", options=dict(STRICT))
    assert_same_training(inductor, apollo)
