"""A chain in plain torch: an encoder of images feeds a language model; inside one micro-batch nothing overlaps."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class Chain(nn.Module):
    """Patches go through an encoder, and in front of the tokens that a causal decoder goes on with."""

    def __init__(
        self, *, width: int, layers: tuple[int, int], heads: int, patches: int, tokens: int, words: int, dropout: float
    ) -> None:
        super().__init__()

        def stack(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=dropout, batch_first=True, norm_first=True)
                for _ in range(count)
            )

        self.encoder, self.decoder = stack(layers[0]), stack(layers[1])
        self.projection = nn.Linear(width, width)
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(patches + tokens, width) * 0.02)
        self.head = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(patches + tokens))

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of predicting every token from those before it."""
        for layer in self.encoder:
            patches = layer(patches)
        hidden = torch.cat([self.projection(patches), self.embedding(tokens)], dim=1) + self.positions
        for layer in self.decoder:
            hidden = layer(hidden, src_mask=self.mask)
        logits = self.head(hidden[:, patches.shape[1] - 1 : -1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
