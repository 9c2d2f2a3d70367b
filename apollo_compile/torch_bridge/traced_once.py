"""Trace a Dynamo graph once for two compiles: `TracedOnce`.

Note [tracing once]: a compile that ends in a fallback compiles the Dynamo graph twice, and of a compile by plain
torch.compile the trace of forward and backward is a large part. The two compiles differ in how AOTAutograd splits what
it traced, and in what compiles the parts, but not in the trace. So a copy of the first trace is the second one: the
partitioner and passes change only the graph that they get. It is taken only where nothing else depends on having
traced: no symbolic sizes, no subclasses of tensors, no effects, no inner graphs, the same description of inputs and
outputs. Elsewhere, and where a release of torch is built otherwise, the graph is traced twice. Who compiles a graph
that reads sizes from tensors, or with other random operators than torch.compile's, must not enter `compiling`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from apollo_compile.torch_bridge.aot_graph import clone_graph

_TRACERS = ("aot_dispatch_autograd_graph", "aot_dispatch_base_graph")
"""Functions of AOTAutograd that trace a graph with its backward, and one without; each has four more arguments than
the description of the graph, `fw_metadata`."""

_SET_BY_TRACERS = ("mutated_inp_stream_indices", "tangent_source_stack_traces")
"""Attributes of the description that they write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trace:
    tracer: str
    graph: fx.GraphModule
    metadata: Any
    """Description of the graph, as it is before compiling changes it."""
    inputs: Sequence[Any]
    """Inputs, as `_describe` returns them."""
    written: Mapping[str, Any]
    """Attributes of the description that the tracer wrote."""
    rest: tuple[Any, Any]
    """Inputs for the compiler, and their descriptions."""


class TracedOnce:
    """The trace of one Dynamo graph: Note [tracing once]."""

    def __init__(self) -> None:
        self._trace: _Trace | None = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Let AOTAutograd trace in the first such context, and take that trace in the second; one compile in each."""
        token = _current.set(self)
        try:
            with _replaced_tracers():
                yield
        finally:
            _current.reset(token)

    def take(self, name: str, trace: Callable[..., Any], args: Sequence[Any], fw_metadata: Any) -> Any:
        """Return what a tracer returns, from an earlier call if there was one that would return the same."""
        known, self._trace, inputs = self._trace, None, _describe(args[1])
        if known and (known.tracer, known.inputs) == (name, inputs) and known.metadata == fw_metadata:
            for attribute, value in known.written.items():
                setattr(fw_metadata, attribute, value)
            return known.graph, *known.rest, None
        before = {attribute: getattr(fw_metadata, attribute, None) for attribute in _SET_BY_TRACERS}
        has_effects = bool(fw_metadata.tokens)  # tracing may take them off
        graph, flat_args, descriptions, subclasses = made = trace(*args, fw_metadata=fw_metadata)
        if subclasses is None and not has_effects and _may_keep(graph, [*args[1], *fw_metadata.traced_tangents]):
            after = {attribute: getattr(fw_metadata, attribute, None) for attribute in _SET_BY_TRACERS}
            copied, metadata = clone_graph(graph), copy.copy(fw_metadata)
            copied.meta = dict(graph.meta)
            metadata.traced_tangents = list(fw_metadata.traced_tangents)  # which compiling empties
            self._trace = _Trace(
                tracer=name,
                graph=copied,
                metadata=metadata,
                inputs=inputs,
                written={each: value for each, value in after.items() if value is not before[each]},
                rest=(_copy(flat_args), _copy(descriptions)),
            )
        return made


_current: contextvars.ContextVar[TracedOnce | None] = contextvars.ContextVar("apollo_traced_once", default=None)
"""Trace of the graph that this thread compiles; another thread may compile at the same time."""


@contextlib.contextmanager
def _replaced_tracers() -> Iterator[None]:
    """Replace the tracers of AOTAutograd; where this torch has none of these names, nothing."""
    usual = {name: getattr(graph_compile, name) for name in _TRACERS if hasattr(graph_compile, name)}
    ours: dict[str, Any] = {name: _make_tracer(name, trace) for name, trace in usual.items()}
    with patch.multiple(graph_compile, **ours) if ours else contextlib.nullcontext():
        yield


def _make_tracer(name: str, trace: Callable[..., Any]) -> Callable[..., Any]:
    def take(*args: Any, **kwargs: Any) -> Any:
        traced_once = _current.get()
        if traced_once is None or len(args) < 4 or kwargs.keys() != {"fw_metadata"}:
            return trace(*args, **kwargs)
        _current.set(None)  # passes over the graph trace patterns and what replaces them, whose inputs are alike
        return traced_once.take(name, trace, args, **kwargs)

    return take


def _may_keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a trace of a graph with these inputs, tangents included, may be taken again."""
    has_inner = any(isinstance(module, fx.GraphModule) for module in graph.children())
    return not has_inner and not has_free_symbols(inputs) and not functorch_config.functionalize_rng_ops


def _describe(inputs: Sequence[Any]) -> list[Any]:
    """Return what a trace depends on of its inputs."""
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.requires_grad)
        if isinstance(each, torch.Tensor) and each.layout == torch.strided
        else each
        for each in inputs
    ]


def _copy(values: Any) -> Any:
    """Copy lists of inputs, which compiling shortens; the graph of a backward has two of them."""
    return type(values)(map(_copy, values)) if isinstance(values, list | tuple) else values
