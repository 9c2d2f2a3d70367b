"""What a case is, the table of all of them, and one step in eager.

    add("tied weights", "An embedding and the layer behind it are one matrix.", model=tied, clip=1.0)

adds a case of `train(model=tied, clip=1.0)`, and so does `@case()` for a function with that name and docstring that
returns a training. Both are made twice, with the same random numbers: for the step and for the loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from apollo_compile.errors import ApolloError, TargetError
from apollo_compile.session.step.split import split_evenly
from tests.end_to_end.step_cases import models
from tests.end_to_end.step_cases.models import Loss, chain, momentum, mse, rows
from tests.end_to_end.twins import run_loop

STEPS = 16
"""A loop, then every variant twice."""
MAX_STEPS = 40
"""As many as variants with variants of their own need."""
MAX_STEPS_COMPILED = 600
"""The same where code of the loss function is measured first, which takes the more steps the shorter they are."""
CHANGE = 8
"""Step before which cases change something: all variants have run once, and will run once more."""


class End(enum.Enum):
    """How a case has to end; in every step that succeeds, the numbers are those of eager."""

    PROGRAM = "every variant that is offered takes steps"
    LOOP = "all steps are loops, and a line says why"
    EITHER = "programs take some steps, and a line says why others are loops"
    RAISES = "all steps raise what they raise in eager"
    REFUSED = "an error says what is wrong, and nothing has changed"


@dataclass(kw_only=True)
class Training:
    """One of the two copies of what is trained."""

    model: nn.Module
    loss_fn: Loss = mse
    optimizer: Any = None
    batch: Callable[[int], Any] = rows
    """Makes the batch of a step."""
    before: Callable[[Any, int], object] = lambda training, number: None
    """Changes something of this training before a step."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What steps run inside of."""
    watched: Callable[[Any], Any] = lambda training: None
    """Returns what else has to be as in eager after every step."""
    notes: list[Any] = field(default_factory=list)
    """What one step leaves for others."""
    microbatches: int = 1
    clip_grad_norm: float | None = None
    split: Callable[[Any, int], Sequence[Any]] | None = None
    weigh: Callable[[Any], float] | None = None

    def take_step(self, batch: Any) -> torch.Tensor:
        """Take one step in eager."""
        parts = list((self.split or split_evenly)(batch, self.microbatches))
        counts = None if self.weigh is None else [float(self.weigh(part)) for part in parts]
        return run_loop(self.model, self.loss_fn, parts, self.optimizer, self.clip_grad_norm, counts)

    def observe(self, batch: Any) -> dict[str, Any]:
        """Return everything that a step may change."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {
            "parameters": parameters,
            "buffers": dict(self.model.named_buffers(remove_duplicate=False)),
            "gradients": {name: parameter.grad for name, parameter in parameters.items()},
            "optimizer": getattr(self.optimizer, "state_dict", dict)(),
            "batch": batch,
            "watched": self.watched(self),
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and how its steps have to end."""

    name: str
    says: str
    make: Callable[[], Training]
    end: End = End.PROGRAM
    reason: str = ""
    """What a line of the log says why steps are loops, or the error; a regular expression."""
    fails: bool = False
    """Whether some steps raise what they raise in eager."""
    rtol: float = 1e-4
    atol: float = 1e-5
    options: Mapping[str, Any] = field(default_factory=dict)
    is_compiled: bool = False
    """Whether Inductor compiles whatever runs, with eager's random numbers; else nothing is compiled."""
    errors: type[Exception] = ApolloError
    """What is raised where it is refused."""


def train(
    model: nn.Module | Callable[[], nn.Module] = chain,
    loss: Loss = mse,
    *,
    by: Any = momentum,
    params: Callable[[Any], Any] = lambda model: model.parameters(),
    change: Callable[[Training], object] | None = None,
    count: int = 2,
    clip: float | None = None,
    **settings: Any,
) -> Training:
    """Return the training of a model by so many micro-batches, in the middle of which something changes."""
    made = model if isinstance(model, nn.Module) else model()
    if change is not None:
        settings["before"] = lambda training, number: number == CHANGE and change(training)
    settings |= {"microbatches": count, "clip_grad_norm": clip}
    return Training(model=made, loss_fn=loss, optimizer=by(params(made)) if callable(by) else by, **settings)


TABLE: dict[str, Case] = {}

EITHER, RAISES = {"end": End.EITHER}, {"end": End.RAISES}
"""How cases end."""


def loop(reason: str = "") -> dict[str, Any]:
    """Return how a case ends all steps of which are loops."""
    return {"end": End.LOOP, "reason": reason}


def refused(reason: str, errors: type[Exception] = TargetError) -> dict[str, Any]:
    """Return how a case ends that is refused."""
    return {"end": End.REFUSED, "errors": errors, "reason": reason}


def add(name: str, says: str = "", make: Callable[..., Training] = train, **settings: Any) -> None:
    """Add a case to the table; what is no setting of a case goes to the function that makes the training."""
    assert name not in TABLE, f"there are two cases called {name}"
    own = {each.name: settings.pop(each.name) for each in fields(Case) if each.name in settings}
    TABLE[name] = Case(name=name, says=says or name, make=partial(make, **settings), **own)


add_texts = partial(add, model=models.Texts, loss=models.word_entropy, batch=models.words)
add_images = partial(add, model=models.convolutions, loss=models.entropy, batch=models.images)


def case(**settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the table; its name and docstring are those of the case."""

    def add_it(make: Callable[..., Any]) -> Callable[..., Any]:
        add(name_of(make), (make.__doc__ or "").strip(), make, **settings)
        return make

    return add_it


def loss(**settings: Any) -> Callable[[Loss], Loss]:
    """Add the training with a loss function to the table; its name and docstring are those of the case."""

    def add_it(loss_fn: Loss) -> Loss:
        add(name_of(loss_fn), (loss_fn.__doc__ or "").strip(), loss=loss_fn, **settings)
        return loss_fn

    return add_it


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in words."""
    return function.__name__.replace("_", " ").strip()
