"""Attention inside of a checkpoint draws no random numbers on a CPU, so nothing is saved to draw them again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apollo_compile.session import registry
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.twins import EAGER


def _attend(x: torch.Tensor, tower: nn.Module) -> torch.Tensor:
    heads = tower(x).unflatten(-1, (2, 8)).transpose(0, 1)[None]
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).sum(1)[0]


def _join(own: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = (checkpoint(_attend, x, tower, use_reentrant=False) for tower in (own.left, own.right))
    return left @ right.T


def test_towers_with_checkpointed_attention_run_in_segments() -> None:
    """Plan forward and backward, with the gradients of eager."""
    expected = Wrapped(_join, left=nn.Linear(16, 16), right=nn.Linear(16, 16))
    model, x = copy.deepcopy(expected), torch.randn(8, 16)
    for run in (expected, torch.compile(model, backend="apollo", options=EAGER)):
        run(x).square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert [len(entry.graphs) for entry in registry.find_models(model)] == [2]
