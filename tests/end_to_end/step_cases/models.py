"""Small models, losses and batches that cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim

WORDS, WIDTH, CLASSES, SAMPLES = 12, 6, 4, 12
"""Twelve samples can be split into 1, 2, 3 and 4 micro-batches."""

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Any], Any]
Make = Callable[..., Any]
"""Makes an optimizer of parameters or groups of them."""

EPS = 1e-3
"""With the default epsilon, gradients that are zero but for rounding become full steps in a random direction."""
sgd = partial(optim.SGD, lr=0.1)
momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(optim.AdamW, lr=0.01, eps=EPS)


def random(number: int) -> torch.Generator:
    """Return a source of random numbers for the batch of a step."""
    return torch.Generator().manual_seed(number)


def rows(number: int, size: int = SAMPLES, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return samples with targets."""
    source = random(number)
    x, y = (torch.randn(size, width, generator=source).to(dtype) for width in (WIDTH, CLASSES))
    return {"x": x, "y": y}


def words(number: int, size: int = SAMPLES, length: int = 5) -> dict[str, Any]:
    """Return texts of words, each with a class; zeros behind their ends."""
    source = random(number)
    text = torch.randint(1, WORDS, (size, length), generator=source)
    text[torch.arange(length) >= torch.randint(1, length, (size,), generator=source)[:, None]] = 0
    return {"words": text, "y": torch.randint(CLASSES, (size,), generator=source)}


def images(number: int, size: int = SAMPLES) -> dict[str, Any]:
    """Return images, each with a class."""
    source = random(number)
    return {"x": torch.randn(size, 3, 8, 8, generator=source), "y": torch.randint(CLASSES, (size,), generator=source)}


def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def autocast_mse(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the mean squared error of a model whose matmuls are in lower precision."""
    with torch.autocast("cpu", dtype=dtype):
        out = model(batch["x"])
    return nn.functional.mse_loss(out.float(), batch["y"])


def off(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return what the outputs of a model are off by."""
    return model(batch["x"]) - batch["y"]


def entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy of classes."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def word_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy of the classes of texts."""
    return nn.functional.cross_entropy(model(batch["words"]), batch["y"])


def chain(*middle: nn.Module, width: int = 8) -> nn.Sequential:
    """Return a linear layer, something in the middle, and another one."""
    return nn.Sequential(nn.Linear(WIDTH, width), *(middle or (nn.Tanh(),)), nn.Linear(width, CLASSES))


def convolutions() -> nn.Sequential:
    """Return a convolution over images, its statistics, and a head."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


class Towers(nn.Module):
    """Two branches that may run side by side, and what joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.left(x) + self.right(x))
        return out


class Texts(nn.Module):
    """An embedding, something over the words of a text, their mean, and a head."""

    def __init__(self, middle: nn.Module | None = None, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = embedding or nn.Embedding(WORDS, 8)
        self.middle = middle or nn.Tanh()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        out = self.middle(self.embedding(text))
        hidden = out[0] if isinstance(out, tuple) else out
        scores: torch.Tensor = self.head(hidden.mean(1))
        return scores


class Wrapped(nn.Module):
    """A model whose forward is a function of modules and parameters that it owns."""

    def __init__(self, forward: Any, **owned: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, value in owned.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self, *inputs)
