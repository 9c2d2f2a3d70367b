"""Small models for the end-to-end tests, and one way to train them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.end_to_end.step_cases.models import Wrapped

STRICT = {"debug.strict": True, "plan.autotune": False, "plan.time_limit_s": 0.5}
"""Options that turn every hidden fallback into an error, and run the plan even where Inductor would be as fast.

Small models need no long search, and there are hundreds.
"""

NEVER_AS_LONG_NS = 10**11
"""For profiles that are to be wrong: however busy the machine is, no segment of these models takes 100 s."""

UNTIL_PROVEN_S = 600.0
"""A time limit for plans that are to be equal: a busy machine does not end the search, its proof does, in a second."""


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
        return self.image(image) @ self.text(text).T


def _run_embedded(own: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = own.embeddings(tokens)
    for layer in own.layers:
        x = x + layer(x)
    return x


def embedded_tower(dropout: float) -> nn.Module:
    """Return a tower whose embedding is small beside its layers, and reads nothing but tokens and seeds of dropout."""
    parts = {"table": nn.Embedding(100, 64), "norm": nn.LayerNorm(64), "dropout": nn.Dropout(dropout)}
    embeddings = Wrapped(lambda own, tokens: own.dropout(own.norm(own.table(tokens))), **parts)
    layers = (nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64), nn.Dropout(dropout)) for _ in range(2))
    return Wrapped(_run_embedded, embeddings=embeddings, layers=nn.ModuleList(layers))


def two_tower_inputs(batch: int = 64, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same random inputs on every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)


def train(
    model: nn.Module, loss_of: Callable[[Callable[..., Any]], torch.Tensor], *, steps: int = 5, **compile_options: Any
) -> Training:
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


def assert_trains_as_in_eager(
    model: nn.Module, loss_of: Callable[[Callable[..., Any]], torch.Tensor], *, steps: int = 5, **compile_options: Any
) -> None:
    """Compare what `train` returns for a compiled copy with what it returns in eager."""
    assert_same_training(train(model, loss_of, steps=steps), train(model, loss_of, steps=steps, **compile_options))


def two_tower_loss(run: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a loss of two towers on the same inputs as ever."""
    return run(*two_tower_inputs()).square().mean()


Training = tuple[list[torch.Tensor], list[Mapping[str, torch.Tensor | None]], Mapping[str, torch.Tensor]]
"""Losses, gradients of every step, state at the end."""


def assert_same_training(expected: Training, actual: Training) -> None:
    """Compare two results of `train` within float32 tolerance; a gradient that is None stays None."""
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    for step, (left, right) in enumerate(zip(expected[1], actual[1], strict=True)):
        assert left.keys() == right.keys()
        for name, gradient in left.items():
            where = f"step {step}, gradient of {name}"
            if gradient is None:
                assert right[name] is None, f"{where}: None in eager"
                continue
            atol = max(1e-6, 1e-4 * float(gradient.abs().max()))
            torch.testing.assert_close(
                right[name], gradient, rtol=1e-3, atol=atol, msg=lambda text, w=where: f"{w}: {text}"
            )
    for name, value in expected[2].items():
        torch.testing.assert_close(actual[2][name], value, rtol=1e-3, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}")


def assert_as_accurate(exact: Training, eager: Training, actual: Training) -> None:
    """Require that `actual` is as close to a float64 run as eager is in float32, up to a small factor.

    Some gradients of real models are small differences of large numbers: eager itself has few right digits of them, so
    a fixed tolerance is either wrong for them or blind for the rest. A gradient that is None in eager is None or zero:
    AOTAutograd gives zeros to what only feeds outputs that the loss does not use, with every backend.
    """
    for step in range(len(exact[0])):
        _assert_within(exact[0][step], eager[0][step], actual[0][step], f"loss of step {step}")
        for name, gradient in exact[1][step].items():
            found, where = actual[1][step][name], f"step {step}, gradient of {name}"
            if gradient is None:
                assert found is None or not found.any(), f"{where}: None in eager"
            else:
                assert found is not None, f"{where}: missing"
                _assert_within(gradient, eager[1][step][name], found, where)
    for name, value in exact[2].items():
        _assert_within(value, eager[2][name], actual[2][name], name)


def _assert_within(exact: torch.Tensor, eager: torch.Tensor | None, actual: torch.Tensor, where: str) -> None:
    assert eager is not None
    assert actual.dtype == eager.dtype
    scale = float(exact.double().abs().max()) if exact.numel() else 0.0
    allowed = 5 * float((eager.double() - exact.double()).abs().max()) + 1e-5 * scale + 1e-7
    error = float((actual.double() - exact.double()).abs().max())
    assert error <= allowed, f"{where}: off by {error:.2e} from float64, eager float32 allows {allowed:.2e}"
