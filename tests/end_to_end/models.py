"""Small models for the end-to-end tests, and one way to train them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

STRICT = {"debug.strict": True}
"""Options that turn every hidden fallback into an error."""


class Tower(nn.Module):
    """A few residual layers, enough to be worth a lane."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after all layers."""
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x


class TwoTowers(nn.Module):
    """Two independent towers that meet in a matrix of similarities."""

    def __init__(self, width: int = 64, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = Tower(width, depth, dropout)
        self.text = Tower(width, depth, dropout)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the similarities of all pairs."""
        return self.image(image) @ self.text(text).T


def two_tower_inputs(batch: int = 64, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same random inputs on every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)


def train(
    model: nn.Module, loss_of: Callable[[Callable[..., Any]], torch.Tensor], *, steps: int = 5, **compile_options: Any
) -> tuple[list[torch.Tensor], list[Mapping[str, torch.Tensor | None]], Mapping[str, torch.Tensor]]:
    """Train a copy of `model` with SGD; return losses, gradients of every step, and the state at the end.

    `compile_options` go to torch.compile; without any the copy stays eager.
    """
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    run: Callable[..., Any] = torch.compile(model, **compile_options) if compile_options else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(run)
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients, {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_training(expected: tuple[Any, Any, Any], actual: tuple[Any, Any, Any]) -> None:
    """Compare two results of `train` within float32 tolerance.

    A gradient that is None in eager is None, or zero: AOTAutograd gives zeros to what only feeds outputs that the loss
    does not use, with every backend.
    """
    for step, (left, right) in enumerate(zip(expected[0], actual[0], strict=True)):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-5, msg=lambda text, s=step: f"loss {s}: {text}")
    for step, (left, right) in enumerate(zip(expected[1], actual[1], strict=True)):
        assert left.keys() == right.keys()
        largest = max(float(gradient.abs().max()) for gradient in left.values() if gradient is not None)
        for name, gradient in left.items():
            if gradient is None:
                assert right[name] is None or not right[name].any(), f"step {step}: {name} has a gradient, not in eager"
                continue
            scale = float(gradient.abs().max())
            torch.testing.assert_close(
                right[name],
                gradient,
                rtol=1e-3,
                atol=max(1e-6, 1e-4 * scale, 1e-8 * largest),  # sums of large terms that cancel carry their noise
                msg=lambda text, s=step, n=name: f"step {s}, gradient of {n}: {text}",
            )
    for name, value in expected[2].items():
        torch.testing.assert_close(actual[2][name], value, rtol=1e-3, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}")
