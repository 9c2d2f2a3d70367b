"""Whole graphs after AOTAutograd, compiled as by Inductor alone.

Workarounds for wrong code (`upstream_bugs/`) apply here as in bodies; such code has cache keys of its own in Inductor's
cache.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from ctypes import c_ulong, py_object, pythonapi
from typing import Any, TypeVar

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner

from apollo_compile.torch_bridge.aot_graph import clone_graph, outputs_of
from apollo_compile.torch_bridge.attention_seeds import read_seeds_anywhere
from apollo_compile.torch_bridge.boundary import with_numbers
from apollo_compile.torch_bridge.compile_scope import (
    CACHE_KEY_TAG,
    as_piece,
    compile_lock,
    fixed_code_generator,
    shared_kwargs,
    within_guards,
)
from apollo_compile.torch_bridge.layouts import check_layouts, output_layouts
from apollo_compile.torch_bridge.upstream_bugs.pooling_divisor import is_left_to_aten
from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import adds_at_addresses

_Result = TypeVar("_Result")


def compile_whole(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a post-AOT graph as Inductor alone would, except for workarounds and for seeds of attention."""
    read_seeds_anywhere(graph_module.graph)  # its forward may be replayed
    tag = torch.compiler.config.cache_key_tag
    # Inductor's key covers neither donated buffers nor workarounds, so its cache may have wrong code for the graph.
    is_fixed = any(is_left_to_aten(node) or adds_at_addresses(node) for node in graph_module.graph.nodes)
    is_own = kwargs.get("is_backward") or is_fixed
    with (
        compile_lock(),
        fixed_code_generator(),
        torch.compiler.config.patch(cache_key_tag=f"{tag} {CACHE_KEY_TAG}" if is_own else tag),  # type: ignore[attr-defined]
    ):
        return compile_fx_inner(graph_module, example_inputs, **kwargs)


def compile_again(
    graph_module: fx.GraphModule, settings: Mapping[str, Any], **kwargs: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a post-AOT graph as Inductor alone would, after AOTAutograd has finished, as another variant of a graph.

    `settings` are Inductor's, as they were when the bodies were compiled, so that both variants compute the same. Every
    output keeps its traced strides, as with bodies, so that the variants can be exchanged.

    Raises:
        Exception: whatever Inductor raises.
        UnsupportedGraphError: Inductor gave an output other strides than traced, or its code needs guards on dynamic
            sizes, which Dynamo can no longer check.
    """
    piece = clone_graph(graph_module)
    read_seeds_anywhere(piece.graph)
    output = piece.graph.output_node()
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(outputs_of(piece)) if isinstance(v, fx.Node)]
    fakes = _inputs_of(piece)

    def work() -> Callable[[list[Any]], Sequence[Any]]:
        own = {**settings, "triton.cudagraphs": False}  # we capture CUDA graphs ourselves
        with compile_lock(), inductor_config.patch(own), as_piece():
            layouts = output_layouts(piece)
            with within_guards(fakes, is_late=True):
                compiled = compile_fx_inner(piece, fakes, **shared_kwargs(kwargs))
            check_layouts("the whole graph", compiled, layouts)
            return with_numbers(compiled, fakes)

    return compile_on_thread(piece, work)


def compile_on_thread(graph_module: fx.GraphModule, work: Callable[[], _Result]) -> _Result:
    """Return what `work` does to compile a post-AOT graph, or pieces of it, after AOTAutograd has finished.

    It runs on a thread of its own, because the caller may be inside a user's step, under autocast or inference mode.
    Inductor uses its cache only inside a tracing context, so a minimal one is provided.

    Raises:
        BaseException: whatever `work` raises; an interrupt, which ends the thread first.
    """
    made: Future[_Result] = Future()

    def run() -> None:
        try:
            with tracing(TracingContext(detect_fake_mode(_inputs_of(graph_module)))):
                made.set_result(work())
        except BaseException as error:  # raised again on the caller's thread
            if not made.done():
                made.set_exception(error)

    context = contextvars.copy_context()  # the settings of other parts of torch, as the user has them
    thread = threading.Thread(target=lambda: context.run(run), name="apollo-compile")
    try:
        thread.start()
        return made.result()
    finally:
        if thread.ident is not None and not made.done():  # interrupted: the next compile must not begin beside this one
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident), py_object(KeyboardInterrupt))
            thread.join()


def _inputs_of(graph_module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
