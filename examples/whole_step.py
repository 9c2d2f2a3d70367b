"""Train a chain of layers, in which only micro-batches can overlap, with a step as one program."""

from __future__ import annotations

import torch
from torch import nn

import apollo_compile


class Chain(nn.Module):
    """Layers of which each needs the one before."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after all layers."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def train(backend: str = "apollo", *, steps: int = 60, width: int = 256, layers: int = 4) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = Chain(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"x": torch.randn(64, width), "y": torch.randn(64, width)}
    if backend == "apollo":
        step_once = apollo_compile.compile_step(model, loss_fn, optimizer, microbatches=2)
    losses = []
    for step in range(steps):
        if backend == "apollo":
            loss = step_once(batch)
        else:  # the loop that it stands for
            optimizer.zero_grad()
            parts = [
                dict(zip(batch, rows, strict=True)) for rows in zip(*(t.chunk(2) for t in batch.values()), strict=True)
            ]
            loss = torch.stack([loss_fn(model, part) / 2 for part in parts]).sum()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 and backend == "apollo":
            print(f"step {step}: loss {losses[-1]:.3f}; {apollo_compile.status(model)}")
    return losses


if __name__ == "__main__":
    train()
