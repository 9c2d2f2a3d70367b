"""Graphs with dynamic shapes: each bucket of sizes gets a graph of its own, with the code of the first.

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
        model: takes the graphs of other sizes.
        first: what the graph is for the sizes that it was traced with.
        graph_module: the graph after AOTAutograd.
        boundary: says where the sizes are among the inputs.
        name: of the graph, without sizes.
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
    """Return a function that does `work` in its first call, and gives its result or its error in every one."""
    lock, left = threading.Lock(), [work]
    done: list[Future[Run]] = []

    def give() -> Run:
        with lock:
            if not done:  # in an interrupt, it is done again
                done.append(at_once(left[0]))
                left.clear()  # it holds a graph
            return done[0].result()

    return give


def with_sizes(name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a graph for these sizes."""
    return f"{name}[{', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}]"
