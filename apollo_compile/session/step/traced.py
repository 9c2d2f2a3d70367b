"""Variants of a step without its program: the step as Inductor traces it, and the loop in eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from apollo_compile.autotune.candidates import CandidateError
from apollo_compile.config import Config
from apollo_compile.ir import Variant
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import find_operator
from apollo_compile.progress import Progress
from apollo_compile.session.graph import COMPILE_NS_PER_OPERATOR
from apollo_compile.session.step.micro_batch import MicroBatchGraphs
from apollo_compile.session.step.program import StepProgram
from apollo_compile.session.step.returned import find_loss, loss_in
from apollo_compile.torch_bridge.gradients import are_finite, describe_difference, find_shared
from apollo_compile.torch_bridge.settings import inductor_settings
from apollo_compile.torch_bridge.traced_step import Made, compile_traced_step, describe_compile_error, is_compile_error
from apollo_compile.torch_bridge.trees import leaves_of, map_tensors

_logger = logging.getLogger(__name__)

_DRAWING = (WorkKind.RANDOM, WorkKind.ATTENTION)
"""Operators that keep their order because they draw random numbers."""


class TracedStep:
    """Forward and backward of all micro-batches as one graph for Inductor.

    Its first step is taken twice, by the loop and by this graph, from the same buffers and the same state of the random
    generator. They must have drawn the same numbers and made the same gradients.

    Arguments:
        program: of the same step; `reason_against_traced` allows it.
        call: the loss function of a micro-batch, not compiled.
        compiled: the same, compiled.
        settings: of Inductor, by their names in `torch._inductor.config`.
    """

    def __init__(
        self,
        program: StepProgram,
        call: Callable[[Any], Any],
        compiled: Callable[[Any], Any],
        settings: Mapping[str, Any],
    ) -> None:
        self.is_ready = False
        """Whether it is compiled, and its step is known to be the loop's."""
        self._program = program
        self._compiled = compiled
        self._run = compile_traced_step(partial(_call_loss, call), program.parameters, settings)
        self._shared: set[int] = set()
        """Places of gradients that share memory with others or an input, or are laid out unlike their parameters."""

    def take(self, parts: Sequence[Any], weights: Sequence[float], finish: Callable[[], None]) -> Sequence[Any] | None:
        """Take a step; return the results of the loss function. `finish` ends it where gradients are left in `.grad`.

        The result is None, and nothing has changed, where it is another graph now, or the loop's gradients are not
        finite, so that it cannot be compared: then this step is a loop.

        Raises:
            CandidateError: it cannot be compiled, or computes other results; nothing has changed.
        """
        tangents = self._program.tangents_of(weights)
        made = self._run(parts, tangents, False) if self.is_ready else self._prove(parts, weights)
        if made is None:
            self.is_ready = False
            return None
        returned, gradients = made
        if not self._program.use_gradients(gradients, self._shared):
            finish()
        return returned

    def _prove(self, parts: Sequence[Any], weights: Sequence[float]) -> Made | None:
        """Compile it, and take a step that equals the loop's; None where the loop's gradients are not finite.

        Raises:
            CandidateError: it cannot be compiled, or its step is another one; nothing has changed.
        """
        program, tangents = self._program, self._program.tangents_of(weights)
        before = _Snapshot(program.micro)
        expected = gradients_of_loop(self._compiled, parts, weights, program.parameters)
        drawn = torch.get_rng_state()
        before.restore()
        try:
            with Progress(f"compiling {program.name} as one graph", expected_ns=compile_ns(program)) as progress:
                progress.at("Inductor, to be compared with the program,")
                made = self._call(parts, tangents)
            if not torch.equal(torch.get_rng_state(), drawn):
                raise CandidateError("it draws other random numbers than the loop")
            if made is not None and are_finite(expected):
                if (difference := describe_difference(made[1], expected)) is not None:
                    raise CandidateError(f"gradients differ from those of the loop: {difference}")
                self.is_ready = True
                inputs = leaves_of([parts, tangents, list(program.micro.state.values())], torch.Tensor)
                given = [each.untyped_storage().data_ptr() for each in inputs if each.layout is torch.strided]
                self._shared |= set(find_shared(made[1], program.parameters, given))
        finally:
            if not self.is_ready:
                before.restore()
        return made if self.is_ready else None

    def _call(self, parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> Made | None:
        try:
            return self._run(parts, weights, True)
        except Exception as error:
            if is_compile_error(error):
                raise CandidateError(describe_compile_error(error)) from error
            raise


class _Snapshot:
    """Buffers and random state before a step, to take it a second time."""

    def __init__(self, micro: MicroBatchGraphs) -> None:
        written = micro.forward.contract.written_inputs or ()
        self._buffers = [(micro.state[place], micro.state[place].clone()) for place in written]
        self._generator = torch.get_rng_state()

    def restore(self) -> None:
        """Restore the buffers and the random state."""
        torch.set_rng_state(self._generator)
        with torch.no_grad():  # a forward may write to parameters
            for buffer, before in self._buffers:
                buffer.copy_(before)


def add_gradients(call: Callable[[Any], Any], parts: Sequence[Any], weights: Sequence[float]) -> Sequence[Any]:
    """Add the gradients of all micro-batches, one after the other; return the results of the loss function."""
    outputs = []
    for part, weight in zip(parts, weights, strict=True):
        returned = call(part)
        (loss_in(returned) * weight).backward()  # type: ignore[no-untyped-call]
        outputs.append(map_tensors(torch.Tensor.detach, returned))
    return outputs


def _call_loss(call: Callable[[Any], Any], part: Any) -> tuple[torch.Tensor, Any]:
    returned = call(part)
    return find_loss(returned), returned


def is_alike_in_eager(program: StepProgram) -> bool:
    """Return whether the loop in eager draws no random numbers, has no effects, and runs without autocast.

    Assertions are no effect: one that fails ends the step, whichever of them it is.
    """
    codes = (program.micro.forward, program.micro.backward)
    kept = (node.target for code in codes for node in code.compilation.capture.nodes if node.keeps_order)
    is_in_order = any(find_operator(target).reads_only != "asserts" for target in kept)
    return not is_in_order and not torch.is_autocast_enabled(program.micro.device.type)


def compile_ns(program: StepProgram) -> int:
    """Return approximately how long Inductor compiles forward and backward of all micro-batches as one graph."""
    codes = (program.micro.forward, program.micro.backward)
    num_nodes = sum(len(code.compilation.capture.nodes) for code in codes)
    return program.step.num_micro_batches * COMPILE_NS_PER_OPERATOR * num_nodes


def reason_against_traced(program: StepProgram) -> str | None:
    """Return why a step must not run as Dynamo traces it; None if it may.

    It has to be possible to take the same step twice.
    """
    codes = (program.micro.forward, program.micro.backward)
    kept = (node.target for code in codes for node in code.compilation.capture.nodes if node.keeps_order)
    operators = ((target, find_operator(target)) for target in kept)
    for target, operator in operators:
        if operator.kind not in _DRAWING and operator.reads_only != "asserts":
            return f"{target} may have an effect"
    return "the backward writes to its inputs" if program.micro.backward.contract.written_inputs else None


def gradients_of_loop(
    call: Callable[[Any], Any], parts: Sequence[Any], weights: Sequence[float], parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the gradients that `add_gradients` would add, zeros where a loss does not depend on a parameter."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for part, weight in zip(parts, weights, strict=True):
        made = torch.autograd.grad(loss_in(call(part)) * weight, parameters, allow_unused=True)
        total = [have if more is None else have + more for have, more in zip(total, made, strict=True)]
    return total


def make_traced_step(
    program: StepProgram, call: Callable[[Any], Any], compiled: Callable[[Any], Any], config: Config
) -> TracedStep | None:
    """Return the traced step of a program; None, with a log line, where there may be none."""
    reason = reason_against_traced(program)
    if reason is not None:
        _logger.info("%s: %s is not compared: %s", program.name, Variant.TRACED, reason)
        return None
    inductor = inductor_settings(config.mode, config.inductor)
    if config.runtime.bodies == "eager":  # which draw the random numbers of eager
        inductor["fallback_random"] = True
    return TracedStep(program, call, compiled, inductor)
