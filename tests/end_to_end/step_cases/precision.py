"""Cases under autocast: weights are float32, and every step casts what they are then, whoever wrote to them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.end_to_end.step_cases.cases import Training, add
from tests.end_to_end.step_cases.changes import halve_data
from tests.end_to_end.step_cases.models import WIDTH, Batch, Towers, Wrapped, adamw, autocast_mse, momentum, rows, sgd
from tests.end_to_end.step_cases.settings import spoiled

CLOSE: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-3}
"""Losses and weights are those of eager up to the rounding of bfloat16."""

mixed = partial(add, loss=autocast_mse, **CLOSE)

# ------------------------------------------------------------------------------------------------- writes from outside


@torch.no_grad()
def _add_to_weights(training: Training, number: int) -> None:
    for parameter in training.model.parameters():
        parameter.add_(0.1)


def _write_to_data(training: Training, number: int) -> None:
    for parameter in training.model.parameters():
        parameter.data.mul_(0.5)


def _write_to_memory(training: Training, number: int) -> None:
    """Write in a way that no version counter of torch sees."""
    for parameter in training.model.parameters():
        parameter.detach().numpy()[...] *= 0.5


def _swap_for_average(training: Training, number: int) -> None:
    """Train with the average of the weights in every second step."""
    if not training.notes:
        training.notes.append(copy.deepcopy(training.model.state_dict()))
    average = training.notes[0]
    for name, tensor in training.model.state_dict().items():
        average[name].lerp_(tensor, 0.1)
    if number % 2:
        training.model.load_state_dict(average)


for name, says, before in (
    ("weights are added to", "Before every step.", _add_to_weights),
    ("data of weights is written to", "Before every step.", _write_to_data),
    ("memory of weights is written to", "Before every step, through NumPy.", _write_to_memory),
    ("weights are swapped for their average", "Before every second step.", _swap_for_average),
    ("data of a weight is replaced", "Before every step.", lambda training, _: halve_data(training)),
):
    mixed(f"autocast: {name}", says, by=adamw, before=before)

# ----------------------------------------------------------------------------------------- what is trained, and how


def _run_tied(own: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = own.second(own.first(x).tanh()).tanh()
    if own.reads_outside:
        with torch.autocast("cpu", enabled=False):
            hidden = hidden.float() @ own.first.weight.square()
    return own.head(hidden)


def _tied(reads_outside: bool) -> nn.Module:
    """Return two layers with one weight, which may also be read outside of autocast."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return Wrapped(_run_tied, first=first, second=second, head=nn.Linear(WIDTH, 4), reads_outside=reads_outside)


def _freeze_by_turns(training: Training, number: int) -> None:
    training.model.left.requires_grad_(number % 6 < 3)


mixed("autocast: a tower is frozen by turns", model=Towers, by=adamw, before=_freeze_by_turns)
mixed("autocast: tied weights", model=partial(_tied, reads_outside=False), by=sgd, clip=1.0)
mixed("autocast: a weight read inside and outside", model=partial(_tied, reads_outside=True), by=adamw)
mixed("autocast: clipped with infinity", batch=partial(spoiled, float("inf")), by=momentum, clip=1.0)
mixed("autocast: one part of a batch of three", model=Towers, by=adamw, count=3, clip=0.5)


def _scaled(model: nn.Module, batch: Batch) -> torch.Tensor:
    return autocast_mse(model, batch, torch.float16) * batch["scale"].mean()


def _with_scale(number: int) -> dict[str, torch.Tensor]:
    made = rows(number)
    return {**made, "scale": torch.full((len(made["x"]),), 2.0 ** (number % 4))}


def _unscale_and_step(training: Training, number: int) -> None:
    """Do what a GradScaler does with the gradients of the step before."""
    if number:
        for parameter in training.model.parameters():
            parameter.grad.div_(2.0 ** ((number - 1) % 4))
        training.notes[0].step()
    else:
        training.notes.append(sgd(training.model.parameters()))
    training.model.zero_grad()


says = "The user unscales gradients and steps, as a GradScaler does."
scaled = {"loss": _scaled, "batch": _with_scale, "by": None, "before": _unscale_and_step, "rtol": 4e-3, "atol": 1e-3}
add("autocast: float16 with a scale that changes", says, **scaled)
