"""A training step as Dynamo traces it whole, and as Inductor compiles it: forward and backward are one graph.

Nothing is saved from one graph to another, and what a backward needs may be computed again without a decision in
advance, so on a chain this is the fastest code that Inductor makes. Dynamo traces gradients since torch 2.11
(`trace_autograd_ops`, off by default).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from apollo_compile.torch_bridge.compile_context import compile_apart, swappable_tensors
from apollo_compile.torch_bridge.compile_scope import compile_lock, own_code_generator
from apollo_compile.torch_bridge.frontend import compile_plainly
from apollo_compile.torch_bridge.trees import map_tensors

Made = tuple[Sequence[Any], Sequence[torch.Tensor]]
"""Results of the loss function, by micro-batch, without graphs, and the gradients of the weighted sum of losses."""


def is_compile_error(error: Exception) -> bool:
    """Return whether Dynamo or Inductor failed, not the code that they compiled."""
    return isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode))


def describe_compile_error(error: Exception) -> str:
    """Return in one line what failed in Dynamo, or in the backend that it called."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def compile_traced_step(
    call_loss: Callable[[Any], tuple[torch.Tensor, Any]],
    parameters: Sequence[torch.Tensor],
    settings: Mapping[str, Any],
) -> Callable[[Sequence[Any], Sequence[torch.Tensor], bool], Made | None]:
    """Return a function of micro-batches, their weights, and whether Inductor may compile their step, as one graph.

    Where it would have to and may not, nothing has run, and the result is None.

    Arguments:
        call_loss: returns the loss of a micro-batch, and all that the loss function returned.
        parameters: what gets gradients; all of them are used.
        settings: of Inductor, by their names in `torch._inductor.config`.
    """
    may_compile = [False]  # Dynamo keeps backends for good, so this one holds nothing else of the step

    def run(parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> Made:
        outputs = []
        gradients: Sequence[torch.Tensor] | None = None
        for part, weight in zip(parts, weights, strict=True):
            loss, returned = call_loss(part)
            made = torch.autograd.grad(loss * weight, parameters)
            outputs.append(map_tensors(torch.Tensor.detach, returned))
            gradients = made if gradients is None else [a + b for a, b in zip(gradients, made, strict=True)]
        assert gradients is not None
        return outputs, gradients

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not may_compile[0]:
            raise RuntimeError("this step is another graph")
        with compile_lock(), own_code_generator():
            return compile_plainly(graph_module, inputs, settings)

    compiled: Callable[..., Made] = compile_apart(run, backend=compile_graph, fullgraph=True, dynamic=False)

    def call(parts: Sequence[Any], weights: Sequence[torch.Tensor], is_first: bool) -> Made | None:
        may_compile[0] = is_first
        try:
            if not is_first:
                return compiled(parts, weights)
            with torch._dynamo.config.patch(trace_autograd_ops=True), swappable_tensors():
                return compiled(parts, weights)
        except Exception as error:
            if is_first or not is_compile_error(error):
                raise
            return None

    return call
