"""A model that compiled steps train, beside an equal one that the plain loop trains in eager; and small models."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from apollo_compile import step as public
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import Step
from tests.end_to_end.models import TwoTowers, two_tower_inputs

EAGER = {
    "runtime.bodies": "eager",
    "plan.autotune": False,
    "plan.replan": False,
    "plan.min_gain": 0.0,
    "plan.time_limit_s": 0.2,
}
"""Bodies that take no time to compile, plans that take little, and the program from the second step on."""

compile_step = partial(public.compile_step, keep_gradients=True)
"""Leaves gradients where these tests look for them; what happens to them otherwise: `session/step/test_program.py`."""

Batch = Mapping[str, torch.Tensor]


class Chain(nn.Module):
    """Layers that feed each other: inside one micro-batch nothing is independent."""

    def __init__(self, *, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.Dropout(dropout))
            for _ in range(3)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def layer() -> nn.Module:
    """Return a model that says nothing about the sizes of a batch but the last."""
    return nn.Sequential(nn.Linear(16, 16))


def chain_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a chain."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def towers_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of two towers."""
    loss: torch.Tensor = model(batch["x"], batch["y"]).square().mean()
    return loss


def chain_batch(seed: int, size: int = 16) -> Batch:
    """Return a batch for a chain."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, 16, generator=generator) for name in ("x", "y")}


def towers_batch(seed: int, size: int = 8) -> Batch:
    """Return a batch for two towers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: each.shape[1:] for name, each in zip(("x", "y"), two_tower_inputs(), strict=True)}
    return {name: torch.randn(size, *shape, generator=generator) for name, shape in shapes.items()}


def run_loop(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Any],
    parts: Iterable[Any],
    optimizer: Any = None,
    clip: float | None = None,
    counts: Sequence[float] | None = None,
) -> torch.Tensor:
    """Take one step as users write it, of these micro-batches, each of which counts so much."""
    parts = list(parts)
    counts = counts or [1.0] * len(parts)
    if optimizer is not None:
        optimizer.zero_grad()
    losses = []
    for part, count in zip(parts, counts, strict=True):
        returned = loss_fn(model, part)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss = loss["loss"] if isinstance(loss, dict) else loss
        loss = loss * (count / sum(counts))
        loss.backward()
        losses.append(loss.detach())
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if optimizer is not None:
        optimizer.step()
    return functools.reduce(torch.add, losses)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def ran_as_program(step: Step) -> bool:
    """Whether every batch that a step has seen twice ran as a program."""
    return bool(step.verdicts) and all("loop" not in verdict for verdict in step.verdicts)


class Twins:
    """A model that compiled steps train, and an equal one.

    Arguments:
        make: makes the model.
        loss_fn: its loss.
        optimize: makes an optimizer of parameters; None trains without one.
        count: micro-batches in a step.
        split: returns so many micro-batches of a batch.
        expected: the equal model, where a copy would not do.
        tolerance: of all comparisons but those of gradients, relative and absolute.
        of_gradients: tolerance of gradients.
        equal_nan: whether what is no number may be so in both.
        settings: of `compile_step`.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = Chain,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor] = chain_loss,
        optimize: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        count: int = 1,
        split: Callable[[Any, int], Sequence[Any]] = split_evenly,
        expected: nn.Module | None = None,
        options: Mapping[str, Any] = EAGER,
        tolerance: tuple[float, float] = (1e-4, 1e-5),
        of_gradients: tuple[float, float] = (1e-3, 1e-5),
        equal_nan: bool = False,
        **settings: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = make()
        self.expected = copy.deepcopy(self.model) if expected is None else expected
        self.both: tuple[Any, Any] = self.model, self.expected
        self.own, self.others = (None if optimize is None else optimize(each.parameters()) for each in self.both)
        self.step = compile_step(
            self.model, loss_fn, self.own, microbatches=count, split=split, options=options, **settings
        )
        self._loss_fn, self._split, self._count = loss_fn, split, count
        self._clip = settings.get("clip_grad_norm")
        self._close, self._close_gradient = (
            partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=equal_nan)
            for rtol, atol in (tolerance, of_gradients)
        )

    def take(self, batch: Any, other: Any = None, *, keeps_gradients: bool = False) -> torch.Tensor:
        """Take a step of both, and compare losses, gradients, parameters and buffers; `other` is the loop's batch."""
        if self.own is None and not keeps_gradients:
            for each in self.both:
                each.zero_grad()
        parts = self._split(batch if other is None else other, self._count)
        wanted = run_loop(self.expected, self._loss_fn, parts, self.others, self._clip)
        loss: torch.Tensor = self.step(batch)
        self._close(loss, wanted.to(loss.dtype))
        for mine, theirs in zip(self.model.parameters(), self.expected.parameters(), strict=True):
            self._close_gradient(mine.grad, theirs.grad)
        self._close(self.model.state_dict(), self.expected.state_dict())
        return loss


def make_towers_twice(
    optimize: Callable[..., torch.optim.Optimizer],
) -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
    """Return two towers with an optimizer, and equal ones to train in eager; nothing is compiled yet."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoTowers(depth=1)
    eager = copy.deepcopy(model)
    return (model, optimize(model.parameters())), (eager, optimize(eager.parameters()))
