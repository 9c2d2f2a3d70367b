"""Whole training steps, for `tools/bench` to measure: micro-batches, their gradients, and the optimizer.

    Task(builder="benchmarks.harness.whole_steps:build_task", arguments={...}, compared=COMPARED)
    Variant(name=..., backend=..., stepper=LOOP)

A step begins with `zero_grad` and ends with the optimizer's, and is timed as a whole. The digest is how much every
parameter changed in `COMPARED_STEPS` steps from the first weights on, after all that was timed, so that it is the
settled variant that is compared.

    LOOP          the loop over micro-batches as users write it, the model in eager or compiled
    FULL_BATCH    the same with all micro-batches as one
    TRACED        forward and backward of all micro-batches as one graph of Dynamo's, then the optimizer
    TRACED_WHOLE  the optimizer inside that graph, too
    COMPILED      `apollo_compile.compile_step`

Of a learner a step is one update: a loop, a traced graph, or a `compile_step` for each of its phases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from apollo_compile.tools.bench.child import Stepper
from apollo_compile.tools.bench.numbers import Numbers
from apollo_compile.tools.bench.task import TOLERANCES
from benchmarks.workloads import build
from benchmarks.workloads.learners import LEARNERS, Learner, MakeStep, Update, build_learner, make_loop

LOOP, FULL_BATCH, TRACED, TRACED_WHOLE, COMPILED = (
    f"{__name__}:{name}" for name in ("Loop", "FullBatch", "TracedStep", "TracedWholeStep", "CompiledStep")
)
OF_LEARNERS: Mapping[str, str] = {
    LOOP: f"{__name__}:Updates",
    TRACED: f"{__name__}:TracedUpdates",
    COMPILED: f"{__name__}:CompiledUpdates",
}
"""Steppers of learners, whose step is one update, with the optimizers of its phases."""

COMPARED = "changes of weights"
COMPARED_STEPS = 3

SGD_RATE = 0.01
ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-2}
"""A large epsilon: by default AdamW turns gradients that are zero but for rounding, such as those of a key's bias, into
full steps in a random direction, and no two variants would be alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTask:
    """A model, one batch, and how steps are taken on it."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    loss_fn: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
    optimizer: str
    """`sgd` or `adamw`."""
    microbatches: int
    adamw: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    """Arguments of AdamW."""
    fused: bool | None = True
    """Whether the optimizer has the fused kernel; None leaves that to torch."""


def build_task(
    *,
    name: str,
    size: str,
    batch: int,
    optimizer: str,
    microbatches: int,
    dropout: float = 0.0,
    fused: bool | None = True,
    autocast: bool = False,
) -> StepTask | Learner:
    """Return a task on a workload, with `autocast` in bfloat16, or a learner, with so many samples in a step."""
    if name in LEARNERS:
        learner = build_learner(name, size, batch=batch)
        return replace(learner, phases=tuple(replace(phase, fused=fused) for phase in learner.phases))
    workload = build(name, size, batch=batch, dropout=dropout)
    draw_class_tokens(workload.model)
    constants = {key: value for key, value in workload.inputs.items() if not isinstance(value, Tensor)}

    def loss_fn(model: nn.Module, part: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return workload.loss(model(**part, **constants))

    return StepTask(
        model=workload.model,
        batch={key: value for key, value in workload.inputs.items() if isinstance(value, Tensor)},
        loss_fn=loss_fn,
        optimizer=optimizer,
        microbatches=microbatches,
        fused=fused,
    )


def draw_class_tokens(model: nn.Module) -> None:
    """Draw class tokens of FLAVA, which are zero: a layer norm of them makes anything of how a compiler rounds."""
    for name, parameter in model.named_parameters():
        if name.endswith("cls_token"):
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))


def make_optimizer(task: StepTask) -> torch.optim.Optimizer:
    """Return the optimizer as the task has it."""
    if task.optimizer == "sgd":
        return torch.optim.SGD(task.model.parameters(), lr=SGD_RATE, fused=task.fused)
    return torch.optim.AdamW(task.model.parameters(), fused=task.fused, **task.adamw)


class Loop(Stepper):
    """The plain loop over micro-batches, on a model in eager or compiled by itself."""

    built: StepTask

    def __init__(self, order: Mapping[str, Any]) -> None:
        # LLaVA checks a number that it reads from a tensor, which breaks the graph of every backend otherwise.
        torch._dynamo.config.capture_scalar_outputs = True
        super().__init__(order)

    def prepare(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the model, and make the optimizer."""
        self.optimizer = make_optimizer(self.built)
        self._first = copy.deepcopy((self.built.model.state_dict(), self.optimizer.state_dict()))
        self.compile(backend, options)

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the model, as users do."""
        self._run: Any = self.built.model
        if backend is not None:
            self._run = torch.compile(self.built.model, backend=backend, options=options or None)

    def step(self) -> Tensor:
        """Take one step; return the mean of the losses."""
        parts = self.parts()
        self.optimizer.zero_grad()
        total: Tensor | None = None
        for part in parts:
            loss = self.built.loss_fn(self._run, part) / len(parts)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        self.optimizer.step()
        assert total is not None
        return total

    def parts(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the micro-batches."""
        return split_evenly(self.built.batch, self.built.microbatches)

    def clear(self) -> None:
        """Leave gradients to the next step, which drops them."""

    def keep_first(self, loss: Any) -> None:
        """Keep nothing: steps of the settled variant are compared."""

    def numbers(self) -> Numbers:
        """Begin again, and return the loss and how the weights changed."""
        self.begin_again()
        for _ in range(COMPARED_STEPS):
            loss = self.step()
        first, _ = self._first
        return self.save_numbers(
            loss, {name: _change_of(first[name], p.detach()) for name, p in self.built.model.named_parameters()}
        )

    def begin_again(self) -> None:
        """Load the first weights, and an optimizer that has not stepped."""
        weights, state = self._first
        self.built.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)


class FullBatch(Loop):
    """One batch instead of micro-batches."""

    def parts(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the batch as it is."""
        return [self.built.batch]


class TracedStep(Loop):
    """Forward and backward of all micro-batches as one graph, for whatever backend compiles it."""

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Let Dynamo trace the calls of autograd."""
        torch._dynamo.config.trace_autograd_ops = True  # for good: the process takes no other steps
        self.parameters = _trained(self.built)
        self._compute = torch.compile(
            self._whole(), backend=backend or "eager", fullgraph=True, dynamic=False, options=options or None
        )

    def _whole(self) -> Callable[[Sequence[Mapping[str, Tensor]]], Any]:
        return _sum_gradients(self.built.model, self.built.loss_fn, self.parameters)

    def step(self) -> Tensor:
        """Take one step."""
        self.optimizer.zero_grad()
        loss, gradients = self._compute(self.parts())
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return loss


class TracedWholeStep(TracedStep):
    """The update inside the graph, too: the functional form of the optimizer, on a state of its own."""

    def _whole(self) -> Callable[[Sequence[Mapping[str, Tensor]]], Any]:
        compute, parameters = super()._whole(), self.parameters
        if self.built.optimizer == "sgd":
            self._state: tuple[list[Tensor], ...] = ()

            def take(parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
                loss, gradients = compute(parts)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-SGD_RATE)
                return loss

            return take
        means, squares = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
        steps = [torch.zeros((), device=each.device) for each in parameters]
        self._state = (means, squares, steps)
        settings = self.built.adamw
        beta1, beta2 = settings["betas"]

        def take_adamw(parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
            loss, gradients = compute(parts)
            with torch.no_grad():
                adamw(
                    parameters,
                    gradients,
                    means,
                    squares,
                    [],
                    steps,
                    foreach=True,
                    capturable=True,  # the number of the step is a tensor, so that Dynamo does not see another one
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=settings["lr"],
                    weight_decay=settings["weight_decay"],
                    eps=settings["eps"],
                    maximize=False,
                )
            return loss

        return take_adamw

    def step(self) -> Tensor:
        """Take one step."""
        loss: Tensor = self._compute(self.parts())
        return loss

    def begin_again(self) -> None:
        """Load the first weights, and clear the state."""
        super().begin_again()
        for tensors in self._state:
            for tensor in tensors:
                tensor.zero_()


class CompiledStep(Loop):
    """The step as `compile_step` makes it."""

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the step; `backend` is apollo."""
        built = self.built
        self._take = compile_step(
            built.model, built.loss_fn, self.optimizer, microbatches=built.microbatches, options=options
        )

    def step(self) -> Tensor:
        """Take one step."""
        return self._take(self.built.batch)

    def is_settled(self) -> bool:
        """Return whether the comparison of whole steps is over."""
        return _is_settled(self._take)

    def ran(self) -> list[str]:
        """Return the verdicts of the comparison."""
        return self._take.verdicts


class Updates(Loop):
    """Updates of a learner, with losses in eager or compiled by themselves."""

    built: Learner  # type: ignore[assignment]

    def prepare(self, backend: str | None, options: dict[str, Any]) -> None:
        """Make the steps of an update."""
        self._update = Update(self.built, self.make_step(backend, options))
        states = [optimizer.state_dict() for optimizer in self._update.optimizers]
        self._first = copy.deepcopy((self.built.model.state_dict(), states))

    def make_step(self, backend: str | None, options: dict[str, Any]) -> MakeStep:
        """Return what makes the step of a phase."""
        return partial(make_loop, backend=backend, options=options or None) if backend is not None else make_loop

    def step(self) -> Tensor:
        """Take one update; return the sum of the losses."""
        return torch.stack(list(self._update(self.built.batch).values())).sum()

    def begin_again(self) -> None:
        """Load the first weights, and optimizers that have not stepped."""
        weights, states = self._first
        self.built.model.load_state_dict(weights)
        self._update.count = 0
        for optimizer, state in zip(self._update.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class TracedUpdates(Updates):
    """Updates of a learner with forward and backward of each phase as one graph, for whatever backend compiles it."""

    def make_step(self, backend: str | None, options: dict[str, Any]) -> MakeStep:
        """Return what makes the step of a phase."""
        torch._dynamo.config.trace_autograd_ops = True  # for good: the process takes no other steps
        compiled = {"backend": backend or "eager", "fullgraph": True, "dynamic": False, "options": options or None}

        def make(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
            parameters = optimizer.param_groups[0]["params"]
            compute = torch.compile(_sum_gradients(model, loss_fn, parameters), **compiled)

            def step(batch: Mapping[str, Tensor]) -> Tensor:
                loss, gradients = compute([batch])
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                return loss

            return step

        return make


class CompiledUpdates(Updates):
    """Updates of a learner with a compiled step for each phase."""

    def make_step(self, backend: str | None, options: dict[str, Any]) -> MakeStep:
        """Return what makes the step of a phase; `backend` is apollo."""
        return partial(compile_step, options=options)

    def is_settled(self) -> bool:
        """Return whether the comparison of whole steps is over in all phases."""
        return all(_is_settled(step) for step in self._update.steps)

    def ran(self) -> list[str]:
        """Return the verdicts of all phases."""
        return [verdict for step in self._update.steps for verdict in step.verdicts]


def _change_of(first: Tensor, now: Tensor) -> npt.NDArray[np.float32]:
    """Return how a weight has changed, and a last number by which no rounding of the weight itself is a difference.

    A target that follows a network changes by little more than what its weights are rounded to. Differences are judged
    beside the largest number, and the last one is the same whoever took the steps: `TOLERANCE` of it is one rounding of
    the largest weight in every step.
    """
    rounding = COMPARED_STEPS * torch.finfo(first.dtype).eps * first.abs().max() / TOLERANCES["float32"]
    return torch.cat([(now - first).flatten(), rounding[None]]).float().numpy()


def _is_settled(step: Any) -> bool:
    return bool(step.verdicts) and all(tuner.is_settled and not tuner.is_more_to_come for tuner in step.tuners)


def _trained(task: StepTask) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    parameters = [each for each in task.model.parameters() if each.requires_grad]
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    loss = task.loss_fn(task.model, task.batch)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for name, buffer in task.model.named_buffers():
            buffer.copy_(buffers[name])
    return [each for each, gradient in zip(parameters, gradients, strict=True) if gradient is not None]


def _sum_gradients(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], parameters: Sequence[nn.Parameter]
) -> Callable[[Sequence[Mapping[str, Tensor]]], tuple[Tensor, list[Tensor]]]:
    """Return a function from micro-batches to their loss and its gradients, added in the loop's order."""

    def compute(parts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        total: Tensor | None = None
        gradients: list[Tensor] = []
        for part in parts:
            loss = loss_fn(model, part) / len(parts)
            made = torch.autograd.grad(loss, parameters)
            gradients = [a + b for a, b in zip(gradients, made, strict=True)] if gradients else list(made)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total, gradients

    return compute
