"""What takes a step instead of its program, without being made of it.

Rival               what `StepTuner` compares the program with
EagerLoop           the loop over micro-batches without a compiler
TracedStep          forward and backward of all micro-batches, as Dynamo traces and Inductor compiles them
MicroBatchesAtOnce  the micro-batches stacked, as one step of one batch (`at_once.py`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from apollo_compile.ir import Variant
from apollo_compile.operators.table import find_operator
from apollo_compile.progress import Progress
from apollo_compile.session.step.micro_batch import Micro
from apollo_compile.session.step.program import StepProgram, find_shared, leave_gradients, own_gradients
from apollo_compile.torch_bridge.traced_step import compile_traced_step, describe_compile_error, is_compile_error
from apollo_compile.torch_bridge.vmap import without_vmap_warnings

if TYPE_CHECKING:
    from apollo_compile.session.step.tuning import StepTuner

RIVALS = (Variant.EAGER, Variant.AT_ONCE, Variant.TRACED)
"""Variants of a step that are not made of its program."""

_TOLERANCE = 0.01
"""Largest difference of a gradient over its norm that is rounding, or sixteen roundings of its dtype."""

_NEGLIGIBLE = 1e-5
"""Share of the norm of all gradients below which one does not matter."""

_TINY = 1e-30


class RivalError(Exception):
    """A rival cannot be compiled, or computes something else; nothing has changed."""


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

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor | None:
        """Take a step of these micro-batches; return the weighted sum of their losses.

        It is None where nothing could be learned of these micro-batches and nothing has changed: this step is a loop.

        Raises:
            RivalError: it cannot be compiled, or computes something else; nothing has changed.
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


class TracedStep:
    """Forward and backward of all micro-batches as one graph for Inductor.

    Arguments:
        program: of the same step.
        loss_of: returns the loss of a micro-batch, not compiled.
        compiled: the same, compiled; gradients of both are compared first, where they can be computed twice.
        settings: of Inductor, by their names in `torch._inductor.config`.
    """

    def __init__(
        self,
        program: StepProgram,
        loss_of: Callable[[Any], torch.Tensor],
        compiled: Callable[[Any], torch.Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        self.leaves_gradients = True
        self.is_ready = False
        self.tuners: Sequence[StepTuner] = ()
        self._program = program
        self._compiled = compiled
        self._run = compile_traced_step(loss_of, program.parameters, settings)

    def take(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor | None:
        """Take a step; see `Rival`."""
        try:
            if self.is_ready:
                loss, gradients = self._call(parts, weights)
            else:
                with Progress(f"compiling {self._program.name} as one graph") as progress, without_vmap_warnings():
                    progress.at("Inductor, to be compared with the program,")
                    loss, gradients = self._call(parts, weights)
        except Exception as error:  # of a compile, which guards may ask for in any step
            if is_compile_error(error):
                raise RivalError(describe_compile_error(error)) from error
            raise
        parameters, micro = self._program.parameters, self._program.micro
        is_provable = not (self.is_ready or writes_to_buffers(micro) or keeps_order(micro))
        if is_provable and not agree(gradients, gradients_of_loop(self._compiled, parts, weights, parameters)):
            return None
        self.is_ready = True
        leave_gradients(parameters, own_gradients(gradients, parameters, find_shared(gradients, parameters, ())))
        return loss

    def _call(self, parts: Sequence[Any], weights: Sequence[float]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        return self._run(parts, [torch.tensor(weight, dtype=self._program.micro.loss_dtype) for weight in weights])


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


def keeps_order(micro: Micro) -> bool:
    """Return whether a micro-batch draws random numbers, which eager would not draw alike, or has effects.

    Assertions do not count: one that fails ends the step, whichever of them it is.
    """
    nodes = (node for half in (micro.forward, micro.backward) for node in half.compilation.capture.nodes)
    return any(node.keeps_order and find_operator(node.target).reads_only != "asserts" for node in nodes)


def writes_to_buffers(micro: Micro) -> bool:
    """Return whether a micro-batch writes to buffers of the model."""
    return any(half.contract.written_inputs for half in (micro.forward, micro.backward))


def gradients_of(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the gradients of a loss, zeros where it does not depend on a parameter, and leave none in `.grad`."""
    made = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, made, strict=True)]


def gradients_of_loop(
    loss_of: Callable[[Any], torch.Tensor],
    parts: Sequence[Any],
    weights: Sequence[float],
    parameters: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Return the gradients that `add_gradients` would add."""
    total: Sequence[torch.Tensor] | None = None
    for part, weight in zip(parts, weights, strict=True):
        made = gradients_of(loss_of(part) * weight, parameters)
        total = made if total is None else [a + b for a, b in zip(total, made, strict=True)]
    assert total is not None
    return total


def agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are those of the loop; False where those are not finite, so that nothing is known.

    Gradients that are zero but for rounding count as far as they matter beside the others.

    Raises:
        RivalError: they differ.
    """
    norms = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in expected]
    if not all(map(math.isfinite, norms)):
        return False
    least = max(_NEGLIGIBLE * math.hypot(*norms), _TINY)
    for ours, theirs, norm in zip(found, expected, norms, strict=True):
        difference = float(torch.linalg.vector_norm(ours - theirs, dtype=torch.float64)) / (norm + least)
        allowed = max(_TOLERANCE, 16 * torch.finfo(theirs.dtype).eps)
        if not difference <= allowed:
            shape = list(theirs.shape)
            raise RivalError(
                f"gradients differ from those of the loop: one of shape {shape} by {difference:.2g} of its norm, where "
                f"{allowed:.2g} may be rounding"
            )
    return True
