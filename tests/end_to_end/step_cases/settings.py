"""Cases by setting of a step: clipping, steps without an optimizer, numbers of micro-batches."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn

from apollo_compile.errors import ConfigError, TargetError
from tests.end_to_end.step_cases.cases import CHANGE, EITHER, RAISES, Training, add, add_texts, loop, refused, train
from tests.end_to_end.step_cases.models import CLASSES, WIDTH, Texts, Towers, Wrapped, adamw, chain, momentum, mse, rows

# ----------------------------------------------------------------------------------------------------------- clipping

of_towers = partial(add, model=Towers)
for clip, count in itertools.product((1e-3, 0.5, 1e6), (1, 2, 4)):
    says = "By the norm of all gradients, which are smaller, or larger, in some or all steps."
    of_towers(f"clipped to {clip:g}, {count} micro-batches", says, by=adamw, clip=clip, count=count)


def spoiled(value: float, number: int) -> dict[str, Any]:
    """Return samples, one of which has this value in the middle of a training."""
    made = rows(number)
    if number == CHANGE:
        made["x"][0, 0] = value
    return made


class Careful(torch.optim.SGD):
    """Takes no step with gradients that are not finite."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        return super().step(closure) if all(bool(p.grad.isfinite().all()) for p in parameters) else None


for value, clip in itertools.product((float("inf"), float("nan")), (None, 1.0)):
    says = "Gradients are not finite in a step, and so are weights afterwards."
    add(f"a sample that is {value}{', clipped' if clip else ''}", says, batch=partial(spoiled, value), clip=clip)
add("gradients that are not finite are not taken", batch=partial(spoiled, float("inf")), by=partial(Careful, lr=0.1))


def _with_a_frozen_layer() -> Training:
    model = Towers()
    model.left.requires_grad_(False)

    def leave(training: Training, number: int) -> None:
        model.left[0].weight.grad = torch.full_like(model.left[0].weight, float(number))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(model, by=momentum(trained), before=leave, clip=0.5)


def _with_unused() -> Towers:
    model = Towers()
    model.unused = nn.Linear(2, 2)
    return model


says = "It was left there by the user, and counts, whatever is trained."
ends = loop("a parameter that gets none in this step has one")
add("clipped with a frozen layer that has a gradient", says, _with_a_frozen_layer, **ends)
add("clipped with an unused layer", "It has no gradient.", model=_with_unused, clip=0.5)
of_towers("clipped with gradients that are zero", loss=lambda m, batch: 0 * mse(m, batch), by=adamw, clip=1.0)
sparse = {"model": lambda: Texts(embedding=nn.Embedding(12, 8, sparse=True)), "clip": 0.1, "count": 1}
add_texts("clipped with a sparse gradient", **sparse, **RAISES)
half = {"params": lambda model: model.left.parameters(), "clip": 0.5, **loop("gradients are there already")}
of_towers("clipped while the optimizer has half of the parameters", **half)

# ------------------------------------------------------------------------------------------------ without an optimizer


def _clear_every_third(training: Training, number: int) -> None:
    if number % 3 == 0:
        training.model.zero_grad()


def _transpose_one(training: Training, number: int) -> None:
    _clear_every_third(training, number)
    if number % 3 == 0:
        training.model.left[0].weight.grad = torch.ones(WIDTH, 8).T


@torch.no_grad()
def _update(training: Training, number: int) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


without = partial(train, model=Towers, by=None)
CLEARING = (
    ("gradients are added up", "And cleared now and then.", _clear_every_third),
    ("gradients are never cleared", "They grow.", lambda *_: None),
    ("gradients are filled with zeros", "And added to.", lambda t, _: t.model.zero_grad(set_to_none=False)),
    ("one gradient is cleared", "The others grow.", lambda t, _: setattr(next(t.model.parameters()), "grad", None)),
    ("a gradient has another layout", "It is added to as it is.", _transpose_one),
)
for (name, says, clear), count in itertools.product(CLEARING, (1, 3)):
    add(f"{name}, {count} micro-batches", says, without, before=clear, count=count)
add("gradients are added up and clipped", make=without, before=_clear_every_third, clip=0.1, **EITHER)
add("the user steps", "By hand, between steps, and clears gradients.", without, before=_update)

# --------------------------------------------------------------------------------------------- numbers and arguments


def _towers_with_all() -> Towers:
    model = Towers()
    model.left.append(nn.BatchNorm1d(8))
    model.right.append(nn.Dropout(0.3))
    return model


for count in (1, 2, 3, 4):
    says = "Statistics and dropout go from one to the next."
    add(f"{count} micro-batches of two towers", says, model=_towers_with_all, by=adamw, count=count, clip=0.5)
for name, says, changed, errors, reason in (
    ("no micro-batches", "At least one is needed.", {"count": 0}, ConfigError, "expected a number of at least 1"),
    ("a norm of zero", "Nothing would be left.", {"clip": 0.0}, ConfigError, "expected a norm above 0"),
    ("a text for a loss function", "It cannot be called.", {"loss": "mse"}, TargetError, "expected a function"),
):
    add(name, says, **refused(reason, errors), **{"count": 1, **changed})
add("a model without parameters that are trained", model=lambda: chain().requires_grad_(False), by=None, **RAISES)
add(
    "a model that is only a parameter",
    model=lambda: Wrapped(lambda own, x: own.bias.expand(len(x), -1), bias=nn.Parameter(torch.zeros(CLASSES))),
    clip=0.1,
)
part = {"loss": lambda m, batch: nn.functional.mse_loss(m.head(m.left(batch["x"])), batch["y"])}
of_towers("a loss that reads some parameters only", by=adamw, **part)
