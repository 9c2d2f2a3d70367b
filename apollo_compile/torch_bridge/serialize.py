"""Compiled code and graphs as data, and back.

The data is valid for this version of this package and of torch, on this machine; cache keys ensure that.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.target.target import CompiledBody, KeepsPython, Run
from apollo_compile.torch_bridge.bodies import finish_native, release_module, with_entry
from apollo_compile.torch_bridge.compile_scope import body_options, compile_lock, native_code


@dataclass(frozen=True, slots=True)
class BundledBody:
    """A body as data."""

    code: CompiledFxGraph
    library: str | None
    """Path of the library that lanes call without Python; None if the body needs Python."""
    entry: str
    """Name of what lanes call in it."""
    constants: tuple[torch.Tensor, ...]
    keeps_python: KeepsPython | None


def bundle_body(body: CompiledBody) -> BundledBody:
    """Return a compiled body as data.

    Raises:
        UnsupportedGraphError: its code was not made by Inductor.
    """
    path = None if body.library is None else body.library._name
    code = bundle_code(body.function)
    return BundledBody(
        code=code, library=path, entry=body.entry_name, constants=body.constants, keeps_python=body.keeps_python
    )


def unbundle_body(bundled: BundledBody) -> CompiledBody:
    """Return a body that can run. If its library still exists, the code for callers in Python is loaded on demand only.

    Raises:
        UnsupportedGraphError: its C++ code no longer compiles.
    """
    path = bundled.library
    if path is not None and Path(path).exists():
        return with_entry(path, bundled.entry, bundled.constants, _LoadedLater(bundled.code))
    if path is None:
        return CompiledBody(function=unbundle_code(bundled.code), keeps_python=bundled.keeps_python)
    with compile_lock(), native_code():
        body = finish_native(_load(bundled.code))
    if isinstance(body, KeepsPython):
        raise UnsupportedGraphError(f"the code of a segment compiles no longer: {body.reason}")
    return body


class _LoadedLater:
    """Callable of a native body for threads with Python, which hardly ever call it: loaded in the first call."""

    def __init__(self, code: CompiledFxGraph) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._function: Run | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        with self._lock:
            if self._function is None:
                with compile_lock(), native_code():
                    self._function = _load(self._code)
        return self._function(inputs)


def bundle_code(compiled: Any) -> CompiledFxGraph:
    """Return compiled code of Inductor as data.

    Raises:
        UnsupportedGraphError: it was not made by Inductor for a CPU.
    """
    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) - {"cpu"}:
        raise UnsupportedGraphError(f"{type(compiled).__name__} is not code of Inductor for a CPU")
    code = copy.copy(compiled)
    code.prepare_for_serialization()
    return code


def unbundle_code(code: CompiledFxGraph) -> Run:
    """Load code of Inductor's Python wrapper."""
    with compile_lock(), inductor_config.patch(body_options()):
        return _load(code)


def _load(code: CompiledFxGraph) -> Run:
    constants = CompiledFxGraphConstants()
    loaded, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if loaded is None:
        raise UnsupportedGraphError("code of an earlier run cannot be loaded")
    kwargs: Any = {"cudagraphs": BoxedBool(False), "is_backward": code.fx_kwargs["is_backward"]}
    loaded.post_compile([], constants, kwargs)
    release_module(loaded)
    return loaded


def bundle_graph(graph_module: fx.GraphModule) -> bytes:
    """Return a post-AOT graph as data.

    Raises:
        UnsupportedGraphError: it has constants.
    """
    if graph_module.graph.find_nodes(op="get_attr"):
        raise UnsupportedGraphError("a graph with constants is not kept")
    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def unbundle_graph(data: bytes) -> fx.GraphModule:
    """Return the graph, with new fake tensors as values."""
    graph_module: Any = GraphPickler.loads(data, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    return graph_module  # type: ignore[no-any-return]
