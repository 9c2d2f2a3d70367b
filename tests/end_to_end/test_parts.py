"""Training models that read equal parts of a value, one by one: ensembles, and loops over time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.tools.explain import explain
from tests.end_to_end.models import STRICT, assert_trains_as_in_eager
from tests.end_to_end.step_cases.models import Wrapped

MEMBERS = 5


def ensemble(join: Callable[[list[torch.Tensor]], torch.Tensor]) -> nn.Module:
    """Return equal critics, whose values are joined; each gets a part of the joined gradient."""
    critics = nn.ModuleList(
        nn.Sequential(*(layer for pair in pairwise((6, 32, 32, 1)) for layer in (nn.Linear(*pair), nn.Tanh())))
        for _ in range(MEMBERS)
    )
    return Wrapped(lambda own, x: join([critic(x) for critic in own.critics]), critics=critics)


def read_moments(own: Any, series: torch.Tensor) -> torch.Tensor:
    """Read one moment of a series after the other into a state; the series is an input, or computed from it."""
    encoded, state = own.encoder(series).relu(), series.new_zeros(len(series), 16)
    states = []
    for moment in range(series.shape[1]):
        state = own.cell(encoded[:, moment] if len(states) % 2 else series[:, moment], state)
        states.append(state)
    return torch.stack(states, dim=1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stacked critics": (lambda: ensemble(torch.stack), (16, 6)),
    "critics side by side": (lambda: ensemble(lambda values: torch.cat(values, dim=1)), (16, 6)),
    "a loop over inputs": (lambda: Wrapped(read_moments, encoder=nn.Identity(), cell=nn.GRUCell(8, 16)), (4, 6, 8)),
    "a loop over values": (lambda: Wrapped(read_moments, encoder=nn.Linear(8, 8), cell=nn.GRUCell(8, 16)), (4, 6, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bodies", ["eager", pytest.param("native", marks=pytest.mark.slow)])
def test_models_that_read_parts_train_as_in_eager(name: str, bodies: str) -> None:
    """Losses and gradients; parts are views of memory that another segment made."""
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)
    options = {**STRICT, "runtime.bodies": bodies}

    def loss_of(run: Any) -> torch.Tensor:
        loss: torch.Tensor = run(x).square().mean()
        return loss

    assert_trains_as_in_eager(model, loss_of, steps=3, backend="apollo", options=options)


@pytest.mark.parametrize("name", ["stacked critics", "critics side by side"])
def test_members_of_an_ensemble_share_code_in_the_backward(name: str) -> None:
    """Each reads another part of the gradient of what joins them."""
    make, shape = CASES[name]
    _, backward = explain(make(), (torch.randn(shape),), options=STRICT).graphs
    assert len(backward.segments) > MEMBERS
    assert backward.num_bodies <= len(backward.segments) - (MEMBERS - 1)
