"""What a spawned process does: it imports its function instead of inheriting it."""

from __future__ import annotations

import torch

from apollo_compile.session import registry
from tests.end_to_end.models import TwoTowers, two_tower_inputs


def train() -> None:
    """Train a model of its own for a step, and compare its gradients with eager's."""
    torch.manual_seed(0)
    model, x = TwoTowers(depth=1), two_tower_inputs()
    expected = torch.autograd.grad(model(*x).square().mean(), list(model.parameters()))
    run = torch.compile(model, backend="apollo", options={"plan.autotune": False})
    actual = torch.autograd.grad(run(*x).square().mean(), list(model.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert registry.find_models(model)[0].graphs, "all of it went to Inductor"
