"""Train a language model that looks at images through an encoder that is not trained, and a projector that is.

The encoder has no backward, and the embedding of the text does not wait for it.
"""

from __future__ import annotations

import torch
from torch import nn

import apollo_compile


def transformer(width: int, layers: int) -> nn.TransformerEncoder:
    """Return a transformer without dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class VisionLanguageModel(nn.Module):
    """Predicts every token of a text from an image and the tokens before it."""

    def __init__(self, width: int, layers: int, num_tokens: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.encoder = transformer(width, layers)
        self.projector = nn.Linear(width, width)
        self.tokens = nn.Embedding(num_tokens, width)
        self.language = transformer(width, layers)
        self.head = nn.Linear(width, num_tokens)
        self.patches.requires_grad_(False)
        self.encoder.requires_grad_(False)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of the text's tokens."""
        seen = self.projector(self.encoder(self.patches(image).flatten(2).mT))
        both = torch.cat([seen, self.tokens(text)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(both.shape[1])
        hidden = self.language(both, mask=mask)[:, seen.shape[1] - 1 : -1]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text.flatten())


def train(backend: str = "apollo", *, steps: int = 60, width: int = 256, layers: int = 3) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = VisionLanguageModel(width, layers, num_tokens=500)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    image, text = torch.randn(4, 3, 64, 64), torch.randint(500, (4, 24))
    losses = []
    for step in range(steps):
        loss = compiled(image, text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 and backend == "apollo":
            print(f"step {step}: loss {losses[-1]:.3f}; {apollo_compile.status(model)}")
    return losses


if __name__ == "__main__":
    train()
