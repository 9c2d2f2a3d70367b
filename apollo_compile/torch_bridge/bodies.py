"""Bodies of segments: nodes cut out of a graph, compiled by Inductor.

A native body is made in two steps, so that the C++ compiler works on some bodies while others are lowered: Inductor
generates code and starts the compiler, and `finish_native` waits for it. `serialize.py` takes the second step for code
of an earlier process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx._lazy_graph_module import _LazyGraphModule

from apollo_compile.ir import Body
from apollo_compile.operators.writes import resizes_storage
from apollo_compile.target.target import CompiledBody, KeepsPython
from apollo_compile.torch_bridge.aot_graph import clone_graph, has_custom_operator
from apollo_compile.torch_bridge.attention_seeds import read_seeds_anywhere
from apollo_compile.torch_bridge.boundary import with_numbers
from apollo_compile.torch_bridge.compile_scope import (
    as_piece,
    body_options,
    compile_lock,
    native_code,
    shared_kwargs,
    within_guards,
)
from apollo_compile.torch_bridge.joined_code import joined
from apollo_compile.torch_bridge.layouts import check_layouts, output_layouts
from apollo_compile.torch_bridge.onednn import is_linear, lower_linear


def extract_body(graph_module: fx.GraphModule, body: Body) -> tuple[fx.GraphModule, list[Any]]:
    """Copy the nodes of `body` into a graph of their own; return it with its fake inputs (tensors and sizes)."""
    originals = [node for node in graph_module.graph.nodes if node.op != "output"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fakes = []
    for number, value in enumerate(body.inputs):
        original = originals[value]
        placeholder = graph.placeholder(f"in{number}")
        placeholder.meta = {key: item for key, item in original.meta.items() if key in ("val", "tensor_meta")}
        copies[original] = placeholder
        fakes.append(original.meta["val"])
    for value in body.nodes:
        copies[originals[value]] = graph.node_copy(originals[value], lambda node: copies[node])
    output = graph.output(tuple(copies[originals[value]] for value in body.outputs))
    output.meta["user_visible_output_idxs"] = list(range(len(body.outputs)))
    read_seeds_anywhere(graph)
    return _LazyGraphModule(graph_module, graph), fakes


def compile_bodies(
    pieces: Sequence[tuple[str, fx.GraphModule, Sequence[Any]]],
    *,
    native: bool,
    at: Callable[[str, int, int], None] = lambda phase, number, count: None,
    **kwargs: Any,
) -> tuple[CompiledBody, ...]:
    """Compile pieces with Inductor.

    Inductor lowers the pieces one after the other on this thread, while the C++ compiler works on earlier ones.

    Arguments:
        pieces: name for the log, graph that returns tensors only (consumed), a fake tensor or a size per input.
        native: try the C++ wrapper first; a piece that it cannot express is compiled with the Python wrapper.
        at: called for progress with the phase, the number of the piece, and the number of pieces.
        kwargs: what AOTAutograd passed for the whole graph, such as `is_backward` and `graph_id`.
    """
    shared = shared_kwargs(kwargs)
    if any(is_linear(node.target) for _, piece, _ in pieces for node in piece.graph.nodes):
        lower_linear()
    fakes_of_all = [fake for _, _, fakes in pieces for fake in fakes]
    with within_guards(fakes_of_all), compile_lock(), as_piece(), joined() as compile_rest:
        layouts = [output_layouts(piece) for _, piece, _ in pieces]
        started = []
        for number, (_, piece, fakes) in enumerate(pieces, 1):
            if native:
                at("body", number, len(pieces))
            started.append(_start_native(piece, fakes, shared) if native else None)
        compile_rest()
        bodies = []
        for number, ((_, piece, fakes), compiled) in enumerate(zip(pieces, started, strict=True), 1):
            at("C++ code of body" if native else "body", number, len(pieces))
            bodies.append(_finish(compiled, piece, fakes, shared))
    for (name, _, _), body, layout in zip(pieces, bodies, layouts, strict=True):
        check_layouts(f"segment {name}", body.function, layout)
    return tuple(
        replace(body, function=with_numbers(body.function, fakes))
        for (_, _, fakes), body in zip(pieces, bodies, strict=True)
    )


_CALLS_PYTHON = KeepsPython("it calls Python, or operators that may be written in Python", is_lost=False)


def _start_native(piece: fx.GraphModule, fakes: Sequence[torch.Tensor], shared: dict[str, Any]) -> Any:
    """Lower a copy of `piece` and start its C++ compiler; return the reason if the piece needs Python."""
    if has_custom_operator(piece) or any(map(resizes_storage, piece.graph.nodes)):
        return _CALLS_PYTHON
    try:
        with native_code():
            compiled = compile_fx_inner(clone_graph(piece), list(fakes), cpp_wrapper=True, **shared)
        release_module(compiled)
        return compiled
    except Exception as error:  # the Python wrapper may succeed where the C++ wrapper fails
        return _loss(error)


def _finish(started: Any, piece: fx.GraphModule, fakes: Sequence[torch.Tensor], shared: dict[str, Any]) -> CompiledBody:
    body = started if started is None or isinstance(started, KeepsPython) else finish_native(started)
    if isinstance(body, CompiledBody):
        return body
    with inductor_config.patch(body_options()):
        return CompiledBody(function=compile_fx_inner(piece, list(fakes), **shared), keeps_python=body)


def finish_native(compiled: Any) -> CompiledBody | KeepsPython:
    """Wait for the C++ compiler; return the reason if the piece needs Python."""
    function = getattr(compiled, "current_callable", None)
    if function is None:  # a piece without any call is returned as plain Python
        return CompiledBody(function=compiled)
    lane_body = getattr(function, "lane_body", None)
    if lane_body is None:
        return _CALLS_PYTHON
    try:
        path, entry, constants = lane_body()
    except Exception as error:  # the C++ compiler failed, which shows only here
        return _loss(error)
    return with_entry(path, entry, tuple(constants), compiled)


def _loss(error: Exception) -> KeepsPython:
    lines = str(error).strip().splitlines() or [""]
    return KeepsPython(f"{type(error).__name__}: {lines[0]}", is_lost=True)


def release_module(compiled: Any) -> None:
    """Remove the Python module of a native body from Inductor's lists, which would keep it alive for ever."""
    lane_body = getattr(getattr(compiled, "current_callable", None), "lane_body", None)
    if lane_body is None:
        return
    own = lane_body.__globals__  # functions keep it without the module
    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if vars(module) is not own]
    PyCodeCache.modules_no_attr.pop(own["__file__"], None)
    PyCodeCache.linemaps.pop(own["__file__"], None)
    named = sys.modules.get(own["__name__"])
    if named is not None and vars(named) is own:
        del sys.modules[own["__name__"]]


def with_entry(
    path: str, entry: str, constants: tuple[torch.Tensor, ...], function: Callable[..., Any]
) -> CompiledBody:
    """Return the body whose native entry is in the library at `path`; threads with the GIL call `function` instead."""
    library = ctypes.CDLL(path)
    address = ctypes.cast(library[entry], ctypes.c_void_p).value
    return CompiledBody(
        function=function, entry_address=address, entry_name=entry, constants=constants, library=library
    )
