"""Two towers of one input, their loss and batches; and steps of which every variant takes some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.twins import EAGER

COMPARED = {**EAGER, "plan.autotune": True, "plan.compile_share": 1e6}
"""Every variant takes steps, the traced step as soon as something has won."""


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of any model here."""
    return model(batch).square().mean()


def batch_of(seed: int) -> torch.Tensor:
    """Return a batch."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def sgd(members: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose updates are large."""
    return torch.optim.SGD(members, lr=0.5)


def make_towers(*, dropout: float = 0.0, depth: int = 2) -> nn.Module:
    """Return two towers that nothing joins but their sum."""
    left, right = (
        nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth)))
        for _ in range(2)
    )
    return Wrapped(lambda own, x: own.left(x) + own.right(x), left=left, right=right)
