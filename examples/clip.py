"""Train a small CLIP, whose two towers run side by side, and write the report as a page."""

from __future__ import annotations

import torch
from transformers import CLIPConfig, CLIPModel

import apollo_compile


def make_model(width: int, layers: int) -> CLIPModel:
    """Return a CLIP with random weights."""
    tower = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
    }
    return CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": 1000, "max_position_embeddings": 32},
            vision_config={**tower, "image_size": 64, "patch_size": 8},
            projection_dim=width,
        )
    )


def train(backend: str = "apollo", *, steps: int = 60, width: int = 256, layers: int = 4) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = make_model(width, layers)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"input_ids": torch.randint(1000, (8, 32)), "pixel_values": torch.randn(8, 3, 64, 64)}
    losses = []
    for step in range(steps):
        loss = compiled(**batch, return_loss=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 and backend == "apollo":
            print(f"step {step}: loss {losses[-1]:.3f}; {apollo_compile.status(model)}")
    if backend == "apollo":
        apollo_compile.report(model).save_html("clip.html")
    return losses


if __name__ == "__main__":
    train()
    print("the report is in clip.html")
