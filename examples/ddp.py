"""Train two towers in several processes: torchrun --standalone --nproc-per-node 2 examples/ddp.py."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apollo_compile


class TwoTowers(nn.Module):
    """Returns the similarities of images and texts."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(
                *[
                    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                    for _ in range(layers)
                ]
            )
            for _ in range(2)
        )

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return a row per image and a column per text."""
        return self.image(image) @ self.text(text).T


def train(backend: str = "apollo", *, steps: int = 60, width: int = 256, layers: int = 3) -> list[float]:
    """Return the loss of every step on this process; the process group is there."""
    torch.manual_seed(0)  # the same weights everywhere
    model = DistributedDataParallel(TwoTowers(width, layers))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + dist.get_rank())  # and other data
    image, text = torch.randn(64, width), torch.randn(64, width)
    losses = []
    for step in range(steps):
        loss = nn.functional.cross_entropy(compiled(image, text), torch.arange(64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 and backend == "apollo" and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}; {apollo_compile.status(model)}")
    return losses


if __name__ == "__main__":
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit("expected several processes: start it with torchrun --standalone --nproc-per-node 2 examples/ddp.py")
    cores = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(max(1, cores))  # torchrun's default is one thread
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
