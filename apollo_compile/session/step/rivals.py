"""What takes a step instead of its program, without being made of it.

    Rival               what `StepTuner` compares the program with
    EagerLoop           the loop over micro-batches without a compiler
    TracedStep          forward and backward of all micro-batches, as Dynamo traces and Inductor compiles them
    MicroBatchesAtOnce  the micro-batches stacked, as one step of one batch

Note [micro-batches at once]: `torch.vmap` runs the loss function for all micro-batches at once, so that a matrix
multiplication has the rows of all of them, and still takes each loss from the samples of its own micro-batch. Losses
and gradients are those of the micro-batches, added in another order. That takes the memory of the whole batch, and is
not possible where a micro-batch draws random numbers or writes to buffers, whose order is the loop's, nor where `vmap`
is known to compute something else. What is not known is found out: before the first such step, gradients are compared
with those of the loop. Nothing else is compiled afterwards, and steps in which Dynamo calls another graph for a
micro-batch are loops, as they are for programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.progress import Progress
from apollo_compile.session.step.micro_batch import Micro
from apollo_compile.session.step.program import StepProgram, find_shared, leave_gradients, own_gradients
from apollo_compile.torch_bridge.traced_step import compile_traced_step, describe_compile_error, is_compile_error
from apollo_compile.torch_bridge.trees import flatten, map_leaves
from apollo_compile.torch_bridge.vmap import without_vmap_warnings
from apollo_compile.units import format_bytes

if TYPE_CHECKING:
    from apollo_compile.session.step.tuning import StepTuner

RIVALS = (Variant.EAGER, Variant.AT_ONCE, Variant.TRACED)
"""Variants of a step that are not made of its program."""

_TOLERANCE = 0.01
"""Largest difference of a gradient over its norm that is rounding, or sixteen roundings of its dtype."""

_NEGLIGIBLE = 1e-5
"""Share of the norm of all gradients below which one does not matter."""

_TINY = 1e-30

_ASSERTIONS = ("aten._assert", "aten.sym_constrain_range")
"""How operators begin whose effect is that they may fail."""


class RivalError(Exception):
    """A rival cannot be compiled; nothing has run."""


class Rival(Protocol):
    """Takes steps instead of a program."""

    leaves_gradients: bool
    """Whether its steps end with the gradients, before clipping and the optimizer."""

    @property
    def is_ready(self) -> bool:
        """Whether everything is compiled, and nothing is being decided any more."""

    @property
    def tuners(self) -> Sequence[StepTuner]:
        """What is known of programs of its own."""

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take a step of these micro-batches; return the weighted sum of their losses.

        Raises:
            RivalError: it cannot be compiled; nothing has run.
        """


class EagerLoop:
    """The loop over micro-batches without a compiler; `loss_of` returns the loss of one."""

    def __init__(self, loss_of: Callable[[Any], torch.Tensor]) -> None:
        self.leaves_gradients = True
        self.is_ready = True
        self.tuners: Sequence[StepTuner] = ()
        self._loss_of = loss_of

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take a step; see `Rival`."""
        return weighted_sum(add_gradients(self._loss_of, parts, weights), weights)


class StepOfStacked(Protocol):
    """A step of stacked micro-batches."""

    @property
    def is_settled(self) -> bool:
        """Whether it is known what runs it."""

    @property
    def tuners(self) -> Sequence[StepTuner]:
        """What is known of its programs."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Return the loss, compiled.

        Raises:
            RivalError: it cannot be compiled.
        """

    def close(self) -> None:
        """Compile nothing any more: whatever would have to be raises RivalError before it runs."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take a step; return the loss."""


class TracedStep:
    """Forward and backward of all micro-batches as one graph for Inductor.

    Arguments:
        program: of the same step.
        loss_of: returns the loss of a micro-batch, not compiled.
        settings: of Inductor, by their names in `torch._inductor.config`.
    """

    def __init__(
        self,
        program: StepProgram,
        loss_of: Callable[[Any], torch.Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        self.leaves_gradients = True
        self.is_ready = False
        self.tuners: Sequence[StepTuner] = ()
        self._program = program
        self._run = compile_traced_step(loss_of, program.parameters, settings)

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take a step; see `Rival`."""
        factors = [torch.tensor(weight, dtype=self._program.micro.loss_dtype) for weight in weights]
        try:
            loss, gradients = self._call(parts, factors)
        except Exception as error:  # of a compile, which guards may ask for in any step
            if is_compile_error(error):
                raise RivalError(describe_compile_error(error)) from error
            raise
        parameters = self._program.parameters
        leave_gradients(parameters, own_gradients(gradients, parameters, find_shared(gradients, parameters, ())))
        return loss

    def _call(
        self, parts: Sequence[Any], factors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        if self.is_ready:
            return self._run(parts, factors)
        with Progress(f"compiling {self._program.name} as one graph") as progress:
            progress.at("Inductor, to be compared with the program,")
            made = self._run(parts, factors)
        self.is_ready = True
        return made


class MicroBatchesAtOnce:
    """The micro-batches stacked, as one step of one batch; see Note [micro-batches at once].

    Arguments:
        step: takes a step of what `stack` returns.
        program: of the same step.
        loss_of: returns the loss of a micro-batch, compiled.
    """

    def __init__(self, step: StepOfStacked, program: StepProgram, loss_of: Callable[[Any], torch.Tensor]) -> None:
        self.leaves_gradients = False
        self._step = step
        self._program = program
        self._loss_of = loss_of
        self._is_proven = False

    @property
    def is_ready(self) -> bool:
        """Whether it is known what runs such steps."""
        return self._step.is_settled

    @property
    def tuners(self) -> Sequence[StepTuner]:
        """Programs of such steps."""
        return self._step.tuners

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take a step; see `Rival`."""
        micro = self._program.micro
        batch = stack(parts, torch.tensor(weights, dtype=micro.loss_dtype, device=micro.device))
        if not self._is_proven:
            with without_vmap_warnings():
                self._prove(batch, parts, weights)
            self._step.close()
            self._is_proven = True
        return self._step(batch)

    def _prove(self, batch: Any, parts: Sequence[Any], weights: Sequence[float]) -> None:
        """Compare gradients with those of the loop, which leaves nothing behind.

        Raises:
            RivalError: they differ, or cannot be computed.
        """
        parameters = self._program.parameters
        try:
            found = _gradients(self._step.loss_of(batch), parameters)
        except RivalError:
            raise
        except Exception as error:  # of whatever `vmap` does not know; the loop says if it is an error of the user's
            raise RivalError(f"{type(error).__name__}: {error}") from error
        expected: Sequence[torch.Tensor] | None = None
        for part, weight in zip(parts, weights, strict=True):
            made = _gradients(self._loss_of(part) * weight, parameters)
            expected = made if expected is None else [a + b for a, b in zip(expected, made, strict=True)]
        assert expected is not None
        if (difference := _largest_difference(found, expected)) is not None:
            raise RivalError(f"gradients differ from those of the loop by {difference}")


def _gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    made = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, made, strict=True)]


def _largest_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Return the largest relative difference, in words; None if all are of rounding.

    Gradients that are zero but for rounding count as far as they matter beside the others.
    """
    norms = [float(norm) for norm in torch._foreach_norm([each.double() for each in expected])]
    least = _NEGLIGIBLE * math.hypot(*norms)
    worst = 0.0
    for ours, theirs, norm in zip(found, expected, norms, strict=True):
        difference = float(torch.linalg.vector_norm(ours.double() - theirs.double())) / max(norm + least, _TINY)
        allowed = max(_TOLERANCE, 16 * torch.finfo(theirs.dtype).eps)
        worst = max(worst, difference / allowed) if math.isfinite(difference) else math.inf
    return None if worst <= 1 else f"{worst * _TOLERANCE:.2g} of their norm"


def add_gradients(
    loss_of: Callable[[Any], torch.Tensor], parts: Sequence[Any], weights: Sequence[float]
) -> list[torch.Tensor]:
    """Add the gradients of all micro-batches, one after the other; return their losses."""
    losses = []
    for part, weight in zip(parts, weights, strict=True):
        loss = loss_of(part)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses


def weighted_sum(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the sum of losses, each times its weight, from the first to the last."""
    total = losses[0] * weights[0]
    for loss, weight in zip(losses[1:], weights[1:], strict=True):
        total = total + loss * weight
    return total


def stack(parts: Sequence[Any], weights: torch.Tensor) -> dict[str, Any]:
    """Return micro-batches as one batch for `loss_of_stacked`: tensors of one place along a new first dimension.

    Raises:
        RivalError: what is no tensor differs between micro-batches, or tensors cannot be stacked.
    """
    first, _, unflatten = flatten(parts[0])
    others = [flatten(part)[0] for part in parts[1:]]
    try:
        stacked = [_stack_alike(alike) for alike in zip(first, *others, strict=True)]
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise RivalError(f"micro-batches cannot be stacked: {error}") from error
    return {"parts": unflatten(stacked), "weights": weights}


def _stack_alike(leaves: Sequence[Any]) -> Any:
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return torch.stack(list(leaves))
    if isinstance(leaves[0], str | int | float | None) and all(leaf == leaves[0] for leaf in leaves):
        return leaves[0]
    raise TypeError(f"they have different objects besides tensors, such as a {type(leaves[0]).__name__}")


def loss_of_stacked(loss_of: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return the loss function of stacked micro-batches; `loss_of` is that of one."""

    def loss_of_all(model: nn.Module, batch: Any) -> torch.Tensor:
        parts = batch["parts"]
        dims = map_leaves(lambda leaf: 0 if isinstance(leaf, torch.Tensor) else None, parts)
        of_each = torch.vmap(lambda part: loss_of(model, part), in_dims=(dims,), randomness="error")
        losses: torch.Tensor = of_each(parts) * batch["weights"]
        return losses.sum()

    return loss_of_all


def keeps_order(micro: Micro) -> bool:
    """Return whether a micro-batch draws random numbers, which eager would not draw alike, or has effects.

    Assertions do not count: one that fails ends the step, whichever of them it is.
    """
    nodes = (node for half in (micro.forward, micro.backward) for node in half.compilation.capture.nodes)
    return any(node.keeps_order and not node.target.startswith(_ASSERTIONS) for node in nodes)


def reason_against_at_once(program: StepProgram, obstacle: str | None) -> str | None:
    """Return why the micro-batches of a program cannot run at once; None if they can.

    Arguments:
        program: of the same step.
        obstacle: of `obstacle_to_vmap`, for a micro-batch.
    """
    if obstacle is not None:
        return obstacle
    halves = (program.micro.forward, program.micro.backward)
    if any(half.contract.written_inputs for half in halves):
        return "a micro-batch writes to buffers of the model"
    if keeps_order(program.micro):
        return "a micro-batch draws random numbers or has effects"
    needed = program.num_micro_batches * program.variants.compilation.memory.peak_bytes
    free = program.variants.target.free_bytes()
    if free is not None and needed > free:
        return f"all micro-batches may need {format_bytes(needed)}, and {format_bytes(free)} are free"
    return None
