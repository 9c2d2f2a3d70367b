"""Cases by setting of a step: clipping, steps without an optimizer, numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from apollo_compile.errors import ConfigError, TargetError
from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import (
    CLASSES,
    WIDTH,
    Batch,
    Texts,
    Towers,
    chain,
    mse,
    rows,
    word_entropy,
    words,
)

sgd = partial(optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(optim.AdamW, lr=0.01, eps=1e-3)


def train(clip: float | None, microbatches: int, **settings: Any) -> Training:
    """Return the training of two towers with clipped gradients."""
    model = Towers()
    return Training(
        model=model, optimizer=adamw(model.parameters()), clip_grad_norm=clip, microbatches=microbatches, **settings
    )


# ----------------------------------------------------------------------------------------------------------- clipping

for clip in (1e-3, 0.5, 1e6):
    for microbatches in (1, 2, 4):
        add_case(
            f"clipped to {clip:g}, {microbatches} micro-batches",
            "By the norm of all gradients, which are smaller, or larger, in some or all steps.",
            partial(train, clip, microbatches),
        )


def _spoiled(value: float, clip: float | None, make: Callable[..., Any]) -> Training:
    """Have gradients that are not finite in one step."""
    model = chain()

    def batch(number: int) -> dict[str, Any]:
        made = rows(number)
        if number == CHANGE:
            made["x"][0, 0] = value
        return made

    return Training(model=model, optimizer=make(model.parameters()), batch=batch, microbatches=2, clip_grad_norm=clip)


for value in (float("inf"), float("nan")):
    for clip in (None, 1.0):
        add_case(
            f"a sample that is {value}{', clipped' if clip else ''}",
            "Gradients are not finite in a step, and so are weights afterwards.",
            partial(_spoiled, value, clip, sgd),
        )


@case()
def gradients_that_are_not_finite_are_not_taken() -> Training:
    """The user's optimizer looks at them first."""

    class Careful(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            if all(bool(p.grad.isfinite().all()) for p in parameters):
                return super().step(closure)
            return None

    return _spoiled(float("inf"), None, partial(Careful, lr=0.1))


@case(end=End.LOOP, reason="a parameter that gets none in this step has one")
def clipped_with_a_frozen_layer_that_has_a_gradient() -> Training:
    """It was left there by the user, and counts, whatever is trained."""
    model = Towers()
    model.left.requires_grad_(False)

    def leave(number: int) -> None:
        model.left[0].weight.grad = torch.full_like(model.left[0].weight, float(number))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model=model, optimizer=sgd(trained), before=leave, microbatches=2, clip_grad_norm=0.5)


@case()
def clipped_with_an_unused_layer() -> Training:
    """It has no gradient."""
    model = Towers()
    model.unused = nn.Linear(2, 2)
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2, clip_grad_norm=0.5)


@case()
def clipped_with_gradients_that_are_zero() -> Training:
    """All of them are, so their norm is zero."""
    return train(1.0, 2, loss_fn=lambda model, batch: 0 * mse(model, batch))


@case(end=End.RAISES)
def clipped_with_a_sparse_gradient() -> Training:
    """As eager does it, or raises."""
    model = Texts(embedding=nn.Embedding(12, 8, sparse=True))
    return Training(
        model=model,
        loss_fn=word_entropy,
        batch=words,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        clip_grad_norm=0.1,
    )


@case(end=End.LOOP, reason="gradients are there already")
def clipped_while_the_optimizer_has_half_of_the_parameters() -> Training:
    """The gradients of the other half are added up, and count."""
    model = Towers()
    return Training(model=model, optimizer=sgd(model.left.parameters()), microbatches=2, clip_grad_norm=0.5)


# ------------------------------------------------------------------------------------------------ without an optimizer


def _without(clear: Callable[[nn.Module, int], object], microbatches: int, clip: float | None) -> Training:
    model = Towers()
    return Training(
        model=model, before=lambda number: clear(model, number), microbatches=microbatches, clip_grad_norm=clip
    )


def clear_every_third(model: nn.Module, number: int) -> None:
    """Clear gradients before some steps."""
    if number % 3 == 0:
        model.zero_grad()


def fill_with_zeros(model: nn.Module, number: int) -> None:
    """Keep the tensors of gradients."""
    model.zero_grad(set_to_none=False)


def clear_one(model: nn.Module, number: int) -> None:
    """Clear one gradient only."""
    next(model.parameters()).grad = None


def transpose_one(model: Any, number: int) -> None:
    """Leave a gradient that is laid out otherwise than its parameter."""
    if number % 3 == 0:
        model.zero_grad()
        model.left[0].weight.grad = torch.ones(WIDTH, 8).T


WITHOUT = {
    "gradients are added up": ("And cleared now and then.", clear_every_third),
    "gradients are never cleared": ("They grow.", lambda model, number: None),
    "gradients are filled with zeros": ("And added to.", fill_with_zeros),
    "one gradient is cleared": ("The others are added to.", clear_one),
    "a gradient has another layout": ("It is added to as it is.", transpose_one),
}
for name, (says, clear) in WITHOUT.items():
    for microbatches in (1, 3):
        full = f"{name}, {microbatches} micro-batches"
        add_case(
            full,
            says,
            partial(_without, clear, microbatches, None),
        )
add_case(
    "gradients are added up and clipped",
    "All of them, again and again.",
    partial(_without, clear_every_third, 2, 0.1),
    end=End.EITHER,
    reason="",
)


@case()
def the_user_steps() -> Training:
    """By hand, between steps, and clears gradients."""
    model = Towers()

    @torch.no_grad()
    def update(number: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None

    return Training(model=model, before=update, microbatches=2)


# --------------------------------------------------------------------------------------------- numbers and arguments

for microbatches in (1, 2, 3, 4):
    add_case(
        f"{microbatches} micro-batches of two towers",
        "Statistics and dropout go from one to the next.",
        partial(lambda count: _towers_with_all(count), microbatches),
    )


def _towers_with_all(microbatches: int) -> Training:
    model = Towers()
    model.left.append(nn.BatchNorm1d(8))
    model.right.append(nn.Dropout(0.3))
    return Training(model=model, optimizer=adamw(model.parameters()), microbatches=microbatches, clip_grad_norm=0.5)


def _with_setting(**settings: Any) -> Training:
    model = chain()
    return Training(**{"model": model, "optimizer": sgd(model.parameters()), **settings})


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no micro-batches": (
        "At least one is needed.",
        {"microbatches": 0},
        ConfigError,
        "expected a number of at least 1",
    ),
    "a norm of zero": ("Nothing would be left.", {"clip_grad_norm": 0.0}, ConfigError, "expected a norm above 0"),
    "a text for a loss function": ("It cannot be called.", {"loss_fn": "mse"}, TargetError, "expected a function"),
}

for name, (says, changed, errors, reason) in REFUSED.items():
    add_case(name, says, partial(_with_setting, **changed), end=End.REFUSED, errors=errors, reason=reason)


@case(end=End.RAISES)
def a_model_without_parameters_that_are_trained() -> Training:
    """All are frozen, so backward raises, in eager too."""
    model = chain()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Training(model=model, microbatches=2)


@case()
def a_model_that_is_only_a_parameter() -> Training:
    """The smallest there is."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(CLASSES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(len(x), -1)

    model = Bias()
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2, clip_grad_norm=0.1)


@case()
def a_loss_that_reads_some_parameters_only() -> Training:
    """Others get no gradients, and no state."""
    model = Towers()

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model.head(model.left(batch["x"])), batch["y"])

    return Training(model=model, loss_fn=loss_fn, optimizer=adamw(model.parameters()), microbatches=2)
