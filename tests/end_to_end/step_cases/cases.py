"""What a case is, the table of all of them, and one step in eager.

    @case()
    def tied_weights() -> Training:
        "An embedding and the layer behind it are one matrix."
        return Training(...)

adds the case "tied weights". The function is called twice, with the same random numbers: for the step and for the loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from apollo_compile.errors import ApolloError
from apollo_compile.session.step.split import split_evenly
from tests.end_to_end.step_cases.models import mse, rows

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
    loss_fn: Callable[[nn.Module, Any], Any] = mse
    optimizer: Any = None
    batch: Callable[[int], Any] = rows
    """Makes the batch of a step."""
    before: Callable[[int], object] = lambda number: None
    """Changes something before a step."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What steps run inside of."""
    watched: Callable[[], Any] = lambda: None
    """Returns what else has to be as in eager after every step."""
    microbatches: int = 1
    clip_grad_norm: float | None = None
    split: Callable[[Any, int], Sequence[Any]] | None = None
    weigh: Callable[[Any], float] | None = None

    def take_step(self, batch: Any) -> torch.Tensor:
        """Take one step in eager, as docs/steps.md has it."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        parts = list((self.split or split_evenly)(batch, self.microbatches))
        counts = [1.0 if self.weigh is None else float(self.weigh(part)) for part in parts]
        losses = []
        for part, count in zip(parts, counts, strict=True):
            returned = self.loss_fn(self.model, part)
            loss = returned[0] if isinstance(returned, tuple) else returned
            (loss * (count / sum(counts))).backward()
            losses.append(loss.detach())
        if self.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        total = losses[0] * (counts[0] / sum(counts))
        for loss, count in zip(losses[1:], counts[1:], strict=True):
            total = total + loss * (count / sum(counts))
        return total

    def observe(self, batch: Any) -> dict[str, Any]:
        """Return everything that a step may change."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        state = getattr(self.optimizer, "state_dict", dict)
        return {
            "parameters": parameters,
            "buffers": dict(self.model.named_buffers(remove_duplicate=False)),
            "gradients": {name: parameter.grad for name, parameter in parameters.items()},
            "optimizer": state(),
            "batch": batch,
            "watched": self.watched(),
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


TABLE: dict[str, Case] = {}


def case(**settings: Any) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Add a function to the table; its name and docstring are those of the case."""

    def add(make: Callable[[], Training]) -> Callable[[], Training]:
        add_case(make.__name__.replace("_", " ").strip(), (make.__doc__ or "").strip(), make, **settings)
        return make

    return add


def add_case(name: str, says: str, make: Callable[[], Training], **settings: Any) -> None:
    """Add a case to the table."""
    assert name not in TABLE, f"there are two cases called {name}"
    assert says.endswith("."), name
    TABLE[name] = Case(name=name, says=says, make=make, **settings)
