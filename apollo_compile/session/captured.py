"""Dynamo graphs whose programs are CUDA graphs: the conditions, and the fallback when a capture fails.

reason_against_capture(model, graph_module, example_inputs) -> str | None
Revertible(model, compiled, kept, compile_plainly)(*arguments)
"""

from __future__ import annotations

import functools
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import Fallback
from apollo_compile.session.warm_start import are_numbers_fixed
from apollo_compile.torch_bridge.cuda_private import find_uncapturable
from apollo_compile.torch_bridge.kept_graph import KeptGraph

_logger = logging.getLogger(__name__)

CompilePlainly = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Compiles a Dynamo graph as torch.compile does."""


def reason_against_capture(model: CompiledModel, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Return why no CUDA graph of ours may run a Dynamo graph; None if one may."""
    device, unsafe = model.target.device, find_uncapturable(graph)
    tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
    elsewhere = {item.device for item in tensors} - {device}
    if not model.ranks.is_alone:
        return "several ranks run it, and a CUDA graph of ours is for a single process"
    if len(tensors) < len(example_inputs):
        return "its sizes change, and a CUDA graph is for one size; dynamic=False makes them constants"
    if elsewhere:
        return f"it has tensors on {', '.join(sorted(map(str, elsewhere)))}, and others on {device}"
    if unsafe is not None:
        return f"it has {unsafe}, which no CUDA graph may hold"
    if model.target.is_capturing():
        return "it is compiled inside of a CUDA graph that the user captures"
    if are_numbers_fixed():
        return "deterministic algorithms are enabled, so timing-based selection is disabled"
    unavailable = model.target.unavailable_reason()
    if unavailable is not None:
        _warn_of_device(unavailable)
    return unavailable


@functools.cache
def _warn_of_device(reason: str) -> None:
    """Warn once per process."""
    _logger.warning(
        "lanes on the GPU stay off, and torch.compile runs all graphs: %s; 'apollo doctor --self-check' tries again",
        reason,
    )


class Revertible:
    """A compiled Dynamo graph that becomes torch.compile's function when a capture or a measurement fails."""

    def __init__(
        self, model: CompiledModel, compiled: Callable[..., Any], kept: KeptGraph, compile_plainly: CompilePlainly
    ) -> None:
        self._model = model
        self._run = compiled
        self._kept: KeptGraph | None = kept
        self._compile_plainly = compile_plainly
        self._lock = threading.Lock()
        """Guards the fallback, which one thread makes."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph; after a failure of an earlier call, fall back to torch.compile's function first."""
        failure = None if self._kept is None else self._model.failure()
        if failure is not None and not self._model.target.is_capturing():
            self._revert(failure, arguments)
        try:
            return self._run(*arguments)
        except torch.OutOfMemoryError as error:
            if self._kept is None or self._model.writes or self._model.target.is_capturing():
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            failure = str(error).partition("\n")[0]
        self._revert(f"out of memory: {failure}", arguments)
        return self._run(*arguments)

    def _revert(self, reason: str, arguments: Sequence[Any]) -> None:
        """Compile the Dynamo graph as torch.compile does, and run that from now on."""
        with self._lock:
            if self._kept is None:  # another thread was here
                return
            self._model.release()
            with self._kept.compiling(arguments) as (graph_module, fakes):
                self._run = self._compile_plainly(graph_module, fakes)
            self._kept = None
            self._model.forget_graphs()
            self._model.fall_back(Fallback(reason=reason, level=logging.WARNING))
