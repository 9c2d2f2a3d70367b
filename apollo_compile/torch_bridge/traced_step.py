"""A training step as Dynamo traces it whole, and as Inductor compiles it: forward and backward are one graph.

Nothing is saved from one graph to another, and what a backward needs may be computed again without a decision in
advance, so on a chain this is the fastest code that Inductor makes. Dynamo traces gradients since torch 2.11
(`trace_autograd_ops`, off by default).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from apollo_compile.torch_bridge.compile_context import compile_apart
from apollo_compile.torch_bridge.frontend import compile_plainly
from apollo_compile.torch_bridge.trees import map_tensors

TracedStepFunction = Callable[[Sequence[Any], Sequence[torch.Tensor]], tuple[Sequence[Any], Sequence[torch.Tensor]]]
"""Takes the micro-batches and their weights; returns what the loss function returned, by micro-batch, without graphs,
and the gradients of the weighted sum of the losses."""


def is_compile_error(error: Exception) -> bool:
    """Return whether Dynamo or Inductor failed, not the code that they compiled."""
    return isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))


def describe_compile_error(error: Exception) -> str:
    """Return in one line what failed in Dynamo, or in the backend that it called."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def compile_traced_step(
    call_loss: Callable[[Any], tuple[torch.Tensor, Any]],
    parameters: Sequence[torch.Tensor],
    settings: Mapping[str, Any],
) -> TracedStepFunction:
    """Return losses and gradients of a step, compiled by Inductor as one graph when it is first called.

    Arguments:
        call_loss: returns the loss of a micro-batch, and all that the loss function returned.
        parameters: what gets gradients; all of them are used.
        settings: of Inductor, by their names in `torch._inductor.config`.
    """

    def run(parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        outputs = []
        gradients: Sequence[torch.Tensor] | None = None
        for part, weight in zip(parts, weights, strict=True):
            loss, returned = call_loss(part)
            made = torch.autograd.grad(loss * weight, parameters)
            outputs.append(map_tensors(torch.Tensor.detach, returned))
            gradients = made if gradients is None else [a + b for a, b in zip(gradients, made, strict=True)]
        assert gradients is not None
        return outputs, gradients

    backend = functools.partial(compile_plainly, settings=settings)
    compiled = compile_apart(run, backend=backend, fullgraph=True, dynamic=False)

    def call(parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            made: tuple[Sequence[Any], Sequence[torch.Tensor]] = compiled(parts, weights)
            return made

    return call
