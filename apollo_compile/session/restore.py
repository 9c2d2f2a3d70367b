"""Bundle a model's graphs for AOTAutograd's cache, and restore them in a later process, which does not trace them.

Inductor caches the code of every segment by itself; but looking it up takes a traced graph, and tracing takes most of a
warm start. A bundle holds the compiled graph: segments, plan, and the code of bodies. Later
results (the plan from measured durations, and the verdict) are in the history, which is read when a bundle is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Role, Variant
from apollo_compile.observe import StageRunner
from apollo_compile.pipeline import compile_finding, rename
from apollo_compile.session.bodies import log_python_bodies
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import Fallback, log_summary, reason_to_fall_back
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, Contract, Run
from apollo_compile.torch_bridge import serialize
from apollo_compile.torch_bridge.compile_scope import shared_kwargs
from apollo_compile.torch_bridge.private_attributes import mark_boxed
from apollo_compile.torch_bridge.settings import current_settings
from apollo_compile.torch_bridge.whole import compile_again

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsBundle:
    """A graph that runs in segments, as data."""

    compilation: Compilation
    """With the first plan."""
    history_key: str | None
    """Key of its finding in the history; None where findings are not kept."""
    bodies: tuple[serialize.BundledBody, ...]
    contract: Contract
    original: bytes | None
    """The graph for Inductor to compile whole; None where variants are not compared."""
    kwargs: Mapping[str, Any]
    """Arguments that AOTAutograd passed for that graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackBundle:
    """The reason of a fallback, as data."""

    role: Role
    fallback: Fallback
    history_key: str | None
    code: Any = None
    """Inductor's code of it, where the other graph of its model runs in segments; None where the Dynamo graph falls
    back to torch.compile, which has its own caches."""


class Restorer:
    """Bundles the graphs of a model, and restores graphs from bundles."""

    def __init__(self, model: CompiledModel) -> None:
        self._model = model

    def unbundle(self, bundle: SegmentsBundle | FallbackBundle) -> Run:
        """Restore a graph that an earlier process compiled.

        Raises:
            Exception: the bundle cannot be used; then all graphs are compiled again.
        """
        if self._model.falls_back:  # its forward fell back
            return placeholder_run
        try:
            if isinstance(bundle, FallbackBundle):
                return self._unbundle_fallback(bundle)
            return self._unbundle_segments(bundle)
        except Exception as error:  # AOTAutograd treats it as a cache miss
            self._model.warm_start.outdate(error)
            _logger.info(
                "%s is compiled again, since its cached code cannot be used: %s: %s",
                self._model.name,
                type(error).__name__,
                error,
            )
            raise

    def _unbundle_fallback(self, bundle: FallbackBundle) -> Run:
        fallback, name = bundle.fallback, self._model.name_of(bundle.role)
        if fallback.unprofitable is not None:
            finding = self._model.warm_start.recall_under(name, bundle.history_key)
            if fallback.unprofitable.finding and (finding is None or finding.variant is not Variant.INDUCTOR):
                raise UnsupportedGraphError("the verdict for Inductor has expired")
            fallback = replace(fallback, unprofitable=rename(fallback.unprofitable, name))
        if bundle.code is None:
            self._model.fall_back(fallback)
            return placeholder_run
        compiled = serialize.unbundle_code(bundle.code)
        self._model.add_fallback(name, fallback)
        return compiled

    def _unbundle_segments(self, bundle: SegmentsBundle) -> Run:
        begin = time.perf_counter_ns()
        name = self._model.name_of(bundle.compilation.capture.role)
        known = rename(bundle.compilation, name)
        compilation = replace(known, finding=None)
        finding = self._model.warm_start.recall_under(name, bundle.history_key)
        if finding is not None:
            runner = StageRunner()
            found = compile_finding(known.capture, known.partition, finding, profile=known.profile, runner=runner)
            compilation = found or compilation
        original, kwargs, settings = bundle.original, bundle.kwargs, current_settings()
        compile_whole: Callable[[], Run] | None = None
        if original is not None:
            compile_whole = lambda: compile_again(serialize.unbundle_graph(original), settings, **kwargs)  # noqa: E731
        reason = None if self._model.is_for_step else reason_to_fall_back(compilation, self._model.config)
        if reason is not None:
            fallback = Fallback(reason=reason, unprofitable=compilation)
            if compilation.capture.role is not Role.BACKWARD:
                self._model.fall_back(fallback)
                return placeholder_run
            if compile_whole is None:
                raise UnsupportedGraphError("the bundle has no graph for Inductor")
            compiled = compile_whole()
            self._model.add_fallback(name, fallback)
            return compiled
        self._model.target.start(compilation.plan.lanes)
        planned = time.perf_counter_ns()
        bodies = tuple(map(serialize.unbundle_body, bundle.bodies))
        log_python_bodies(compilation, bodies)
        code = Code(bodies=bodies, contract=bundle.contract)
        graph = self._model.load(compilation, code, compile_whole=compile_whole)
        self._model.add(graph)
        log_summary(compilation, planned - begin, time.perf_counter_ns() - planned, did="loaded")
        return graph

    def bundle_fallback(self, role: Role, fallback: Fallback, run: Run | None = None) -> FallbackBundle:
        """Return the bundle of a graph that falls back; `run` is Inductor's code if its Dynamo graph does not."""
        key = self._model.warm_start.key_of(self._model.name_of(role))
        code = None if run is None else serialize.bundle_code(run)
        return FallbackBundle(role=role, fallback=fallback, history_key=key, code=code)

    def bundle_segments(
        self, graph: CompiledGraph, original: fx.GraphModule | None, kwargs: Mapping[str, Any]
    ) -> SegmentsBundle:
        """Return the bundle of a graph that runs in segments."""
        return SegmentsBundle(
            compilation=graph.compilation,
            history_key=self._model.warm_start.key_of(graph.compilation.capture.name),
            bodies=tuple(map(serialize.bundle_body, graph.code.bodies)),
            contract=graph.code.contract,
            original=None if original is None else serialize.bundle_graph(original),
            kwargs=shared_kwargs(kwargs),
        )


@mark_boxed
def placeholder_run(inputs: list[Any]) -> Sequence[Any]:
    """Placeholder for a graph of a Dynamo graph that falls back; never called, as torch.compile compiles it again."""
    raise AssertionError("internal error: the placeholder of a graph that fell back was called")
