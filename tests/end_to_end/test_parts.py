"""Training models that read equal parts of a value, one by one: ensembles, and loops over time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.tools.explain import explain
from tests.end_to_end.models import STRICT, assert_same_training, train

MEMBERS = 5


class Ensemble(nn.Module):
    """Equal critics, whose values are joined; each gets a part of the joined gradient."""

    def __init__(self, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        sizes = (6, 32, 32, 1)
        self.critics = nn.ModuleList(
            nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())))
            for _ in range(MEMBERS)
        )
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join([critic(x) for critic in self.critics])


class Loop(nn.Module):
    """A state that reads one moment of a series after the other; the series is an input, or computed from it."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8) if computes else nn.Identity()
        self.cell = nn.GRUCell(8, 16)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        encoded, state = self.encoder(series).relu(), series.new_zeros(len(series), 16)
        states = []
        for moment in range(series.shape[1]):
            state = self.cell(encoded[:, moment] if len(states) % 2 else series[:, moment], state)
            states.append(state)
        return torch.stack(states, dim=1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stacked critics": (lambda: Ensemble(torch.stack), (16, 6)),
    "critics side by side": (lambda: Ensemble(lambda values: torch.cat(values, dim=1)), (16, 6)),
    "a loop over inputs": (lambda: Loop(computes=False), (4, 6, 8)),
    "a loop over values": (lambda: Loop(computes=True), (4, 6, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bodies", ["eager", pytest.param("native", marks=pytest.mark.slow)])
def test_models_that_read_parts_train_as_in_eager(name: str, bodies: str) -> None:
    """Losses and gradients; parts are views of memory that another segment made."""
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)

    def loss_of(run: Any) -> torch.Tensor:
        return run(x).square().mean()

    options: dict[str, Any] = {**STRICT, "runtime.bodies": bodies}
    eager = train(model, loss_of, steps=3)
    apollo = train(model, loss_of, steps=3, backend="apollo", options=options)
    assert_same_training(eager, apollo)


@pytest.mark.parametrize("name", ["stacked critics", "critics side by side"])
def test_members_of_an_ensemble_share_code_in_the_backward(name: str) -> None:
    """Each reads another part of the gradient of what joins them."""
    make, shape = CASES[name]
    _, backward = explain(make(), (torch.randn(shape),), options=STRICT).graphs
    assert len(backward.segments) > MEMBERS
    assert backward.num_bodies <= len(backward.segments) - (MEMBERS - 1)
