"""Training a policy that calls one backbone for two cameras, and towers whose seeds are drawn at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.workloads.act import Act, FrozenBatchNorm
from tests.end_to_end.models import STRICT, EmbeddedTowers, assert_same_training, train


def policy(norm: type[nn.Module]) -> tuple[Act, tuple[torch.Tensor, ...]]:
    """Return a small policy and its inputs."""
    torch.manual_seed(0)
    model = Act(backbone=8, stages=(1, 1), width=16, hidden=32, layers=1, heads=2, chunk=5, norm=norm)
    return model, (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32), torch.randn(2, 14), torch.randn(2, 5, 14))


@pytest.mark.parametrize(
    ("norm", "bodies"),
    [
        (FrozenBatchNorm, "eager"),
        (nn.BatchNorm2d, "eager"),
        pytest.param(FrozenBatchNorm, "native", marks=pytest.mark.slow),
        pytest.param(nn.BatchNorm2d, "native", marks=pytest.mark.soak),
    ],
)
def test_a_policy_with_two_cameras_trains_as_in_eager(norm: type[nn.Module], bodies: str) -> None:
    """Losses, gradients, and the running statistics that both calls update in turn."""
    model, inputs = policy(norm)
    options: dict[str, Any] = {**STRICT, "runtime.bodies": bodies}
    eager = train(model, lambda run: run(*inputs), steps=3)
    apollo = train(model, lambda run: run(*inputs), steps=3, backend="apollo", options=options)
    assert_same_training(eager, apollo)


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
