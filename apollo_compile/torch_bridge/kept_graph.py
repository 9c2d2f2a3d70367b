"""A Dynamo graph that is compiled once more, while the model trains: `KeptGraph`.

Note [compiling beside training]: that compile runs on the thread that trains, between two steps, and not in the
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
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from apollo_compile.torch_bridge.compile_scope import within_guards
from apollo_compile.torch_bridge.dynamic_sizes import has_sizes
from apollo_compile.torch_bridge.dynamo_graph import clear_metadata, copy_dynamo_graph


class KeptGraph:
    """A copy of a Dynamo graph, to be compiled once, or never."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Copy the graph while Dynamo compiles it for these inputs, without references to its tensors."""
        self._copied = copy_dynamo_graph(graph_module)
        placeholders = self._copied.graph.find_nodes(op="placeholder")
        for node in placeholders:
            node.meta.pop("grapharg", None)
        traced = enumerate(node.meta.get("example_value") for node in placeholders)
        self.sized = tuple(place for place, value in traced if has_sizes(value))
        """Positions of inputs that are sizes, or tensors with sizes, that change."""
        self._fakes = _fakes_with_symbols(example_inputs) if self.sized else None
        """The inputs with the symbols of Dynamo's trace, which no other trace would have; None without any."""

    @property
    def num_nodes(self) -> int:
        """Number of its nodes."""
        return len(self._copied.graph.nodes)

    @contextlib.contextmanager
    def compiling(
        self, arguments: Sequence[Any], moved: Sequence[int] = ()
    ) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
        """Yield the copy, which a compile may change, and fake tensors like `arguments`, which have its shapes.

        Arguments at the `moved` positions are on another device than those that it was traced with.

        To be entered once, within a call of the compiled function: Dynamo's guards ensure that grad mode and autocast
        are those that the graph was traced under. Sizes that change are the symbols of Dynamo's trace.

        Raises:
            UnsupportedGraphError: the code would be for some of the sizes only, which Dynamo's guards do not check.
        """
        if self._fakes is None:
            fake_mode = FakeTensorMode(shape_env=ShapeEnv())
            fakes = [
                fake_mode.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) else item
                for item in arguments
            ]
        else:
            fakes, self._fakes = self._fakes, None
            traced = detect_fake_mode(fakes)
            assert traced is not None, "symbols are sizes of fake tensors"
            fake_mode = traced
            for place in moved:
                fakes[place] = fake_mode.from_tensor(arguments[place], static_shapes=True)
        try:
            with (
                dynamo_lock,
                _disable_current_modes(),
                tracing(TracingContext(fake_mode)),
                within_guards(fakes, is_late=True),
            ):
                yield self._copied, fakes
        finally:
            clear_metadata(self._copied)


def _fakes_with_symbols(example_inputs: Sequence[Any]) -> list[Any]:
    """Return fake tensors for the inputs of the graph that Dynamo compiles now, as AOTAutograd makes them."""
    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None, "Dynamo traces with fake tensors"
    fake_mode = context.fake_mode
    fakes: list[Any] = []
    for item in example_inputs:
        if not isinstance(item, torch.Tensor) or is_fake(item):
            fakes.append(item)
            continue
        known = context.tensor_to_context.get(item)  # type: ignore[no-untyped-call]
        source = None if known is None else known.tensor_source
        fakes.append(fake_mode.from_tensor(item, symbolic_context=known, source=source))
    return fakes
