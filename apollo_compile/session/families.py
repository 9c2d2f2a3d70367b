"""Graphs with dynamic shapes: each bucket of sizes gets its own planned graph, all with the same code.

make_family(model, first, graph_module, boundary, name) -> GraphFamily
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from torch import fx

from apollo_compile.device.target import Run
from apollo_compile.observe import StageRunner
from apollo_compile.passes.capture import read_formulas, resize_capture
from apollo_compile.pipeline import compile_sizes
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.buckets import GraphFamily, at_once
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import log_summary
from apollo_compile.torch_bridge.boundary import Boundary

_logger = logging.getLogger(__name__)


def make_family(
    model: CompiledModel, first: CompiledGraph, graph_module: fx.GraphModule, boundary: Boundary, name: str
) -> GraphFamily[CompiledGraph]:
    """Return a graph with dynamic shapes.

    Arguments:
        model: the model that the graphs of other sizes are added to.
        first: the graph for the sizes that it was traced with.
        graph_module: the graph after AOTAutograd.
        boundary: has the positions of the sizes among the inputs.
        name: name of the graph, without sizes.
    """
    config, profile = model.config, model.target.profile
    compile_whole = None if first.compile_whole is None else _once(first.compile_whole)
    capture = first.compilation.capture
    formulas = read_formulas(graph_module, capture)

    def compare_variants(graph: CompiledGraph) -> None:
        graph.compile_whole = compile_whole
        if compile_whole is not None:
            tell = partial(_logger.info, "%s: chosen by measuring: %s", graph.compilation.capture.name)
            graph.autotuner = Autotuner([graph], tell, is_watched=False)

    def make(sizes: Mapping[str, int]) -> CompiledGraph:
        begin = time.perf_counter_ns()
        resized = resize_capture(capture, formulas, sizes, name=with_sizes(name, sizes))
        runner = StageRunner()
        compilation = compile_sizes(first.compilation, resized, profile=profile, config=config, runner=runner)
        graph = first.planned_as(compilation)
        compare_variants(graph)
        model.graphs.append(graph)
        log_summary(compilation, time.perf_counter_ns() - begin, 0)
        return graph

    compare_variants(first)
    return GraphFamily(
        name=name,
        boundary=boundary,
        symbols=formulas.symbols,
        sizes=boundary.sizes,
        first=first,
        make=make,
        drop=model.graphs.remove,
        is_strict=config.debug.strict,
    )


def _once(work: Callable[[], Run]) -> Callable[[], Run]:
    """Return a function that does `work` in its first call, and returns its result or raises its error in all."""
    lock, pending = threading.Lock(), [work]
    done: list[Future[Run]] = []

    def give() -> Run:
        with lock:
            if not done:  # an interrupt leaves it empty, so the next call tries again
                done.append(at_once(pending[0]))
                pending.clear()  # it keeps a graph alive
            return done[0].result()

    return give


def with_sizes(name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a graph for these sizes."""
    return f"{name}[{', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}]"
