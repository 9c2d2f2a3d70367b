"""All micro-batches of a step at once.

    MicroBatchesAtOnce(step, program, loss_of)      a rival of the program
    reason_against_at_once(program, obstacle)       why there is none
    loss_of_stacked(loss_of)                        the loss function of its steps

Note [micro-batches at once]: `torch.vmap` runs the loss function for all micro-batches at once, so that a matrix
multiplication has the rows of all of them, and still takes each loss from the samples of its own micro-batch. Losses
and gradients are those of the micro-batches, added in another order. That takes the memory of the whole batch, and is
not possible where a micro-batch draws random numbers or writes to buffers, whose order is the loop's, nor where `vmap`
is known to compute something else. What is not known is found out: before the first such step, gradients are compared
with those of the loop. Nothing else is compiled afterwards, and steps in which Dynamo calls another graph for a
micro-batch are loops, as they are for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from apollo_compile.session.step.program import StepProgram
from apollo_compile.session.step.rivals import (
    RivalError,
    agree,
    gradients_of,
    gradients_of_loop,
    keeps_order,
    writes_to_buffers,
)
from apollo_compile.torch_bridge.trees import flatten, map_leaves
from apollo_compile.torch_bridge.vmap import without_vmap_warnings
from apollo_compile.units import format_bytes

if TYPE_CHECKING:
    from apollo_compile.session.step.tuning import StepTuner


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

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor | None:
        """Take a step; see `Rival`."""
        micro = self._program.micro
        batch = stack(parts, torch.tensor(weights, dtype=micro.loss_dtype, device=micro.device))
        if not self._is_proven:
            with without_vmap_warnings():
                self._is_proven = self._prove(batch, parts, weights)
            if not self._is_proven:
                return None
            self._step.close()
        return self._step(batch)

    def _prove(self, batch: Any, parts: Sequence[Any], weights: Sequence[float]) -> bool:
        """Compare gradients with those of the loop; see `agree`.

        Raises:
            RivalError: they differ, or cannot be computed.
        """
        try:
            return agree(
                gradients_of(self._step.loss_of(batch), self._program.parameters),
                gradients_of_loop(self._loss_of, parts, weights, self._program.parameters),
            )
        except RivalError:
            raise
        except Exception as error:  # of what `vmap` or memory does not allow; the loop shows an error of the user's
            raise RivalError(f"{type(error).__name__}: {error}") from error


def stack(parts: Sequence[Any], weights: torch.Tensor) -> dict[str, Any]:
    """Return micro-batches as one batch for `loss_of_stacked`: tensors of one place along a new first dimension.

    Raises:
        RivalError: what is no tensor differs between micro-batches, or tensors cannot be stacked.
    """
    first, _, unflatten = flatten(parts[0])
    others = [flatten(part)[0] for part in parts[1:]]
    try:
        stacked = [_stack_alike(alike) for alike in zip(first, *others, strict=True)]
    except (RuntimeError, TypeError, ValueError) as error:  # other shapes, or kinds of tensors that have no stack
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


def reason_against_at_once(program: StepProgram, obstacle: str | None) -> str | None:
    """Return why the micro-batches of a program cannot run at once; None if they can.

    Arguments:
        program: of the same step.
        obstacle: of `obstacle_to_vmap`, for a micro-batch.
    """
    if obstacle is not None:
        return obstacle
    if writes_to_buffers(program.micro):
        return "a micro-batch writes to buffers of the model"
    if keeps_order(program.micro):
        return "a micro-batch draws random numbers or has effects"
    gradients = sum(parameter.nbytes for parameter in program.parameters)  # of the proof: ours, the loop's, their sums
    needed = program.num_micro_batches * program.variants.compilation.memory.peak_bytes + 4 * gradients
    free = program.variants.target.free_bytes()
    if free is not None and needed > free:
        return f"all micro-batches may need {format_bytes(needed)}, and {format_bytes(free)} are free"
    return None
