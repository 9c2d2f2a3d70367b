"""A Dynamo graph that may be compiled once more, while the model trains: `KeptGraph`.

Note [compiling beside training]: such a compile runs on the thread that trains, between two steps, and not in the
background. Tracing a graph sets a flag of the whole process, and while it is set, a call of any compiled model raises
"Detected that you are using FX to symbolically trace a dynamo-optimized function"
(`torch.fx._symbolic_trace._is_fx_tracing_flag`, which `torch._dynamo.eval_frame` reads); tracing also replaces
`nn.Module.__call__` for all threads. AOTAutograd traces, and so do passes of Inductor. Settings of torch, its tracing
context and fake tensors, on the other hand, belong to a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock as dynamo_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from apollo_compile.torch_bridge.compile_scope import within_guards
from apollo_compile.torch_bridge.dynamo_graph import clear_metadata, copy_dynamo_graph


class KeptGraph:
    """A copy of a Dynamo graph, to be compiled later, or never; its sizes are constants."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        """Copy the graph while Dynamo compiles it, without references to its tensors."""
        self._copied = copy_dynamo_graph(graph_module)
        for node in self._copied.graph.find_nodes(op="placeholder"):
            node.meta.pop("grapharg", None)

    @contextlib.contextmanager
    def compiling(self, arguments: Sequence[Any]) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
        """Yield the copy, which a compile may change, and fake tensors like `arguments`, which have its shapes.

        Enter it within a call of the compiled function: Dynamo's guards ensure that grad mode and autocast are those
        that the graph was traced under.
        """
        copied = copy_dynamo_graph(self._copied)
        fake_mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [
            fake_mode.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) else item
            for item in arguments
        ]
        context, guards = tracing(TracingContext(fake_mode)), within_guards(fakes, is_late=True)
        try:
            with dynamo_lock, _disable_current_modes(), context, guards:
                yield copied, fakes
        finally:
            clear_metadata(copied)
