"""Bundle a model's graphs for AOTAutograd's cache, and restore them in a later process.

Restorer.bundle_segments(...), bundle_whole(...), bundle_fallback(...)    when a graph was compiled
Restorer.unbundle(bundle) -> Run                                          when the cache has it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Role, Variant
from apollo_compile.observe import StageRunner
from apollo_compile.pipeline import compile_finding, rename
from apollo_compile.session.bodies import log_python_bodies
from apollo_compile.session.bundle import FallbackBundle, SegmentsBundle, WholeBundle
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import Fallback, log_summary, reason_to_fall_back
from apollo_compile.target.target import Code, Run
from apollo_compile.torch_bridge.compile_scope import shared_kwargs
from apollo_compile.torch_bridge.private_attributes import mark_boxed
from apollo_compile.torch_bridge.serialize import (
    bundle_body,
    bundle_code,
    bundle_graph,
    unbundle_body,
    unbundle_code,
    unbundle_graph,
)
from apollo_compile.torch_bridge.settings import current_settings
from apollo_compile.torch_bridge.whole import compile_again

_logger = logging.getLogger(__name__)


class Restorer:
    """Bundles the graphs of a model, and restores graphs from bundles."""

    def __init__(self, model: CompiledModel) -> None:
        self._model = model

    def unbundle(self, bundle: SegmentsBundle | WholeBundle | FallbackBundle) -> Run:
        """Restore a graph that an earlier process compiled.

        Raises:
            Exception: the bundle cannot be used; then all graphs are compiled again.
        """
        if self._model.falls_back:  # its forward fell back
            return placeholder_run
        try:
            match bundle:
                case FallbackBundle():
                    return self._unbundle_fallback(bundle)
                case WholeBundle():
                    return self._unbundle_whole(bundle)
                case SegmentsBundle():
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
        self._model.fall_back(self._restore_reason(bundle))
        return placeholder_run

    def _unbundle_whole(self, bundle: WholeBundle) -> Run:
        fallback = self._restore_reason(bundle)
        compiled = unbundle_code(bundle.code)
        self._model.add_fallback(self._model.name_of(bundle.role), fallback)
        return compiled

    def _restore_reason(self, bundle: WholeBundle | FallbackBundle) -> Fallback:
        unprofitable, name = bundle.fallback.unprofitable, self._model.name_of(bundle.role)
        if unprofitable is None:
            return bundle.fallback
        finding = self._model.warm_start.recall_under(name, bundle.history_key)
        if unprofitable.finding is not None and (finding is None or finding.variant != Variant.INDUCTOR):
            raise UnsupportedGraphError("that Inductor is faster is known no longer")
        return replace(bundle.fallback, unprofitable=rename(unprofitable, name))

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
        original, kwargs = bundle.original, bundle.kwargs
        compile_whole = None if original is None else partial(_compile_bundled, original, current_settings(), kwargs)
        reason = None if self._model.is_for_step else reason_to_fall_back(compilation, self._model.config)
        if reason is not None:
            fallback = Fallback(reason=reason, unprofitable=compilation)
            if compilation.capture.role is not Role.BACKWARD:
                self._model.fall_back(fallback)
                return placeholder_run
            if compile_whole is None:
                raise UnsupportedGraphError("there is no graph that Inductor could compile")
            compiled = compile_whole()
            self._model.add_fallback(name, fallback)
            return compiled
        self._model.target.start(compilation.plan.lanes)
        planned = time.perf_counter_ns()
        bodies = tuple(map(unbundle_body, bundle.bodies))
        log_python_bodies(compilation, bodies)
        code = Code(bodies=bodies, contract=bundle.contract)
        graph = self._model.load(compilation, code, compile_whole=compile_whole)
        self._model.add(graph)
        log_summary(compilation, planned - begin, time.perf_counter_ns() - planned, did="loaded")
        return graph

    def bundle_fallback(self, role: Role, fallback: Fallback) -> FallbackBundle:
        """Return the bundle of a graph whose Dynamo graph falls back."""
        key = self._model.warm_start.key_of(self._model.name_of(role))
        return FallbackBundle(role=role, fallback=fallback, history_key=key)

    def bundle_whole(self, role: Role, fallback: Fallback, run: Run) -> WholeBundle:
        """Return the bundle of a graph that Inductor compiled whole."""
        key = self._model.warm_start.key_of(self._model.name_of(role))
        return WholeBundle(role=role, fallback=fallback, history_key=key, code=bundle_code(run))

    def bundle_segments(
        self, graph: CompiledGraph, original: fx.GraphModule | None, kwargs: Mapping[str, Any]
    ) -> SegmentsBundle:
        """Return the bundle of a graph that runs in segments."""
        return SegmentsBundle(
            compilation=graph.compilation,
            history_key=self._model.warm_start.key_of(graph.compilation.capture.name),
            bodies=tuple(map(bundle_body, graph.code.bodies)),
            contract=graph.code.contract,
            original=None if original is None else bundle_graph(original),
            kwargs=shared_kwargs(kwargs),
        )


def _compile_bundled(original: bytes, settings: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Run:
    """Compile the whole graph in a bundle with Inductor."""
    return compile_again(unbundle_graph(original), settings, **kwargs)


@mark_boxed
def placeholder_run(inputs: list[Any]) -> Sequence[Any]:
    """Placeholder for a graph of a Dynamo graph that falls back; never called, as torch.compile compiles it again."""
    raise AssertionError("internal error: the placeholder of a graph that fell back was called")
