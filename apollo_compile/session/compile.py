"""Compile a Dynamo graph: AOTAutograd splits it into forward and backward, or an inference graph; each is planned.

    GraphCompiler(model, settings).compile(graph_module, example_inputs) -> the function that Dynamo calls

Note [fallback]: a Dynamo graph that segments cannot express, or that would gain nothing from them, gets exactly the
function that `torch.compile(mode=..., options=...)` makes: same code, same caches, same memory. One INFO line says why.
Whether it falls back is known once its forward, or inference graph, has been planned. By then AOTAutograd has traced a
copy of the Dynamo graph and split it with our settings. All that follows the trace is dropped, and done again with
those of `torch.compile`: Note [tracing once] in `torch_bridge/traced_once.py`. Where AOTAutograd's cache is in use, the
reason is cached there, so that a later process knows it without planning. A backward that cannot run in segments
although its forward does is compiled whole by Inductor; where programs are CUDA graphs, its forward falls back with it.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from apollo_compile.config import Config
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.errors import RankError, UnsupportedGraphError
from apollo_compile.ir import Role, Variant
from apollo_compile.progress import Progress
from apollo_compile.session.bodies import BodyGraphs, choose_libraries, compile_code, extract_bodies
from apollo_compile.session.captured import Revertible, reason_against_capture
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import (
    Fallback,
    is_autotuned,
    log_summary,
    plan_graph,
    reason_to_fall_back,
    role_of,
)
from apollo_compile.session.restore import Restorer, placeholder_run
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, Run, Target
from apollo_compile.torch_bridge.aot_cache import Bundle, Cache
from apollo_compile.torch_bridge.aot_graph import clone_graph, return_uncast_gradients
from apollo_compile.torch_bridge.cxx_compiler import compiler_complaint
from apollo_compile.torch_bridge.dynamo_graph import copy_of_dynamo_graph, reads_numbers
from apollo_compile.torch_bridge.frontend import compile_plainly, compile_with_inductor, is_for_dynamo
from apollo_compile.torch_bridge.interpret import interpret_whole
from apollo_compile.torch_bridge.kept_graph import KeptGraph
from apollo_compile.torch_bridge.layouts import report_output_strides
from apollo_compile.torch_bridge.settings import current_settings, with_settings
from apollo_compile.torch_bridge.traced import TracedGraph, take_graph
from apollo_compile.torch_bridge.traced_once import TracedOnce
from apollo_compile.torch_bridge.whole import compile_again, compile_whole

_logger = logging.getLogger(__name__)


class GraphCompiler:
    """Compiles one Dynamo graph, in segments or by torch.compile with these Inductor settings."""

    def __init__(self, model: CompiledModel, settings: Mapping[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self._restorer = Restorer(model)
        self._backward_at_once = False

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the function that Dynamo calls.

        Raises:
            Exception: whatever torch.compile alone would raise.
            RankError: the ranks cannot agree on a plan.
        """
        model = self._model
        # compiling the backward of numbers that are read from tensors may fail, and then a step has to run in pieces
        has_numbers = reads_numbers(graph_module)
        self._backward_at_once = model.is_for_step and has_numbers
        reason, is_captured = model.without_lanes, model.target.captures
        if reason is None and is_captured:
            reason = reason_against_capture(model, graph_module, example_inputs)
        if reason is not None:
            model.fall_back(Fallback(reason=reason))
            return self._compile_plainly(graph_module, example_inputs)
        kept = KeptGraph(graph_module) if is_captured else None
        has_own_operators = model.config.runtime.bodies == "eager"
        tracing = nullcontext if has_numbers or has_own_operators else TracedOnce().compiling
        try:
            with with_settings(self._settings), copy_of_dynamo_graph(graph_module) as copied, tracing():
                compiled = compile_with_inductor(
                    copied,
                    example_inputs,
                    self.compile_graph,
                    recompute_masks=model.config.runtime.recompute_masks,
                    eager_randomness=has_own_operators,
                    backward_at_once=self._backward_at_once or is_captured,
                    cache=self._cache(graph_module, example_inputs),
                    settings=self._settings,
                )
        except Exception as error:  # an error of the user's model comes again from torch.compile
            if model.config.debug.strict or isinstance(error, RankError) or is_for_dynamo(error):
                raise
            model.forget_graphs()
            model.fall_back(Fallback(reason=f"{type(error).__name__}: {error}", level=logging.WARNING))
        if model.falls_back:
            with tracing():
                return self._compile_plainly(graph_module, example_inputs)
        return compiled if kept is None else Revertible(model, compiled, kept, self._compile_plainly)

    def _cache(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Cache | None:
        """Return how AOTAutograd's cache loads the graphs of a Dynamo graph; None where they are not to be cached."""
        key = self._model.warm_start.bundle_key(graph_module, example_inputs)
        return None if key is None else Cache(key=key, unbundle=self._restorer.unbundle)

    def compile_graph(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[Run, Bundle | None]:
        """Compile one graph after AOTAutograd; `kwargs` are those of Inductor's inner compiler."""
        model, restorer = self._model, self._restorer
        role = role_of(graph_module, kwargs)
        name = model.name_of(role)
        if role is not Role.BACKWARD:  # graphs loaded from AOTAutograd's cache were incomplete
            model.forget_graphs()
        elif model.falls_back:  # with its forward
            return placeholder_run, partial(restorer.bundle_fallback, role, Fallback(reason=""))
        outdated = model.warm_start.outdated
        if model.config.debug.strict and outdated is not None and not isinstance(outdated, UnsupportedGraphError):
            raise outdated
        traced: TracedGraph | None = None
        made: tuple[Run, Bundle | None] | Fallback
        try:
            if role is Role.BACKWARD and model.config.partition.casts == "apart":
                return_uncast_gradients(graph_module)
            traced = take_graph(graph_module, example_inputs, kwargs)
            made = self._compile_segments(traced, name=name, role=role)
        except RankError:  # a fallback would run other code than the other ranks
            raise
        except UnsupportedGraphError as error:
            made = Fallback(reason=str(error))
        except Exception as error:  # a bug of ours, but Inductor can still compile it: training must not stop
            if model.config.debug.strict:
                raise
            made = Fallback(reason=f"{type(error).__name__}: {error}", level=logging.WARNING)
        if not isinstance(made, Fallback):
            report_output_strides(graph_module)
            run, bundle = made
            return run, bundle if outdated is None else None
        is_kept = outdated is None and made.level == logging.INFO and (traced is None or traced.boundary is None)
        run, bundle = self._compile_fallback(made, graph_module, example_inputs, role, **kwargs)
        return run, bundle if is_kept else None

    def _compile_fallback(
        self, fallback: Fallback, graph_module: fx.GraphModule, example_inputs: Sequence[Any], role: Role, **kwargs: Any
    ) -> tuple[Run, Bundle | None]:
        """Let Inductor compile a graph whole, or the Dynamo graph that it comes from."""
        model, restorer = self._model, self._restorer
        if role is not Role.BACKWARD or model.target.captures:
            model.fall_back(fallback)
            report_output_strides(graph_module)
            return placeholder_run, partial(restorer.bundle_fallback, role, fallback)
        model.add_fallback(model.name_of(role), fallback)
        try:
            run = self._compile_whole(graph_module, example_inputs, **kwargs)
        except Exception as failure:
            if role is not Role.BACKWARD or model.warm_start.bundles is None:
                raise
            return _failing_run(failure), None  # it compiles with the forward, and may never be called
        return run, partial(restorer.bundle_fallback, role, fallback, run)

    def _compile_segments(self, traced: TracedGraph, *, name: str, role: Role) -> tuple[Run, Bundle | None] | Fallback:
        """Plan a graph, and compile its bodies if the plan may gain.

        Raises:
            UnsupportedGraphError: segments cannot express the graph.
        """
        begin = time.perf_counter_ns()
        model = self._model
        graph_module, boundary, kwargs = traced.graph_module, traced.boundary, traced.kwargs
        config, target, agreement = model.config, model.target, Agreement(model.ranks)
        self._check_supported(traced)
        compilation = plan_graph(
            graph_module,
            name=name,
            role=role,
            profile=target.profile,
            config=_first_config(config, target),
            device=target.device,
            static=traced.contract.static_inputs,
            agreement=agreement,
            recall=model.warm_start.recall,
        )
        planned = time.perf_counter_ns()
        pieces = extract_bodies(traced, compilation)
        saved_ns = choose_libraries(pieces, compilation, config, target, agreement)
        is_alone = model.ranks.is_alone
        num_before = model.num_before if is_alone else 0
        reason = reason_to_fall_back(compilation, config, num_before=num_before, is_alone=is_alone, saved_ns=saved_ns)
        if reason is not None and not model.is_for_step:
            if compilation.finding is None:
                model.warm_start.keep(compilation, Variant.INDUCTOR, None)
            return Fallback(reason=reason, unprofitable=compilation)
        original = clone_graph(traced.whole) if is_autotuned(compilation.plan, config) else None
        compile_original = None if original is None else partial(compile_again, original, current_settings(), **kwargs)
        target.start(compilation.plan.lanes)  # fails before anything is compiled if threads cannot be pinned
        code, is_compiled = self._compile_code(pieces, traced, compilation, name=name)
        graph = model.load(
            compilation,
            code,
            compile_whole=compile_original if is_compiled else None,
            boundary=boundary,
            sized=traced.sized,
        )
        log_summary(compilation, planned - begin, time.perf_counter_ns() - planned)
        if graph.is_deterministic:
            _logger.info("%s: deterministic algorithms are enabled; timing-based selection is disabled", name)
        model.add(graph)
        return graph, partial(self._restorer.bundle_segments, graph, original, kwargs) if boundary is None else None

    def _check_supported(self, traced: TracedGraph) -> None:
        """Check that the graph can be planned for this job's ranks, its dynamic sizes, and its device.

        Raises:
            UnsupportedGraphError: it cannot.
        """
        ranks, contract = self._model.ranks, traced.contract
        if not ranks.can_agree:
            raise UnsupportedGraphError("several ranks cannot agree on its plan: their process group has no store")
        if traced.sizes and self._model.config.plan.memory_quota is not None:
            raise UnsupportedGraphError(
                "a memory quota is kept by plans for known sizes only, and its shapes are dynamic; compile with "
                "dynamic=False to get lanes"
            )
        if traced.sizes and not ranks.is_alone:
            raise UnsupportedGraphError(
                "several ranks do not agree on plans for dynamic shapes; compile with dynamic=False to get lanes"
            )
        if not self._model.target.captures:
            return
        if contract.unsafe is not None:
            raise UnsupportedGraphError(f"it has {contract.unsafe}, which no CUDA graph may hold")
        if contract.written_inputs is None:
            raise UnsupportedGraphError("it writes to other tensors than its inputs, which no CUDA graph may do")
        if traced.boundary is not None:
            raise UnsupportedGraphError("it takes sizes or objects besides tensors, and a CUDA graph takes tensors")

    def _compile_code(
        self, pieces: BodyGraphs, traced: TracedGraph, compilation: Compilation, *, name: str
    ) -> tuple[Code, bool]:
        """Return the code of a graph, and whether it is as the options say: eager bodies if no C++ compiler works."""
        config, target = self._model.config, self._model.target
        try:
            with Progress(f"compiling {name}{self._model.again}") as progress:
                return compile_code(pieces, traced, compilation, config, target, at=progress.at), True
        except Exception as error:
            self._accept_missing_compiler(error)
            in_eager = replace(config, runtime=replace(config.runtime, bodies="eager"))
            return compile_code(extract_bodies(traced, compilation), traced, compilation, in_eager, target), False

    # ---------------------------------------------------------------------------------------------- by Inductor

    def _compile_plainly(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the Dynamo graph as torch.compile does; without a C++ compiler, interpret it."""
        with (
            copy_of_dynamo_graph(graph_module) as kept,
            Progress(f"compiling {self._model.name}{self._model.again}") as progress,
        ):
            progress.at("as torch.compile does,")
            try:
                return compile_plainly(
                    graph_module, example_inputs, self._settings, backward_at_once=self._backward_at_once
                )
            except Exception as error:
                self._note_missing_compiler(error)
                with with_settings(self._settings):
                    return compile_with_inductor(
                        kept,
                        example_inputs,
                        lambda graph, *_, **__: (interpret_whole(graph), None),
                        recompute_masks=False,
                        settings=self._settings,
                    )

    def _compile_whole(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """Let Inductor compile the whole graph; without a C++ compiler, interpret it."""
        original = clone_graph(graph_module)
        try:
            compiled: Run = compile_whole(graph_module, example_inputs, **kwargs)
            return compiled
        except Exception as error:
            self._note_missing_compiler(error)
            return interpret_whole(original)

    def _note_missing_compiler(self, error: Exception) -> None:
        complaint = self._accept_missing_compiler(error)
        self._model.add_to_reason(f"operator by operator, since {complaint}")

    def _accept_missing_compiler(self, error: Exception) -> str:
        """Warn that the C++ compiler does not work and return its complaint; re-raise any other error."""
        complaint = compiler_complaint(error)
        if complaint is None or self._model.config.debug.strict or not self._model.target.has_native_bodies:
            raise error
        _warn_of_compiler(complaint)
        return complaint


def _first_config(config: Config, target: Target) -> Config:
    """Return the options for the first plan: the greedy planner if it is replanned after its bodies are timed."""
    is_soon_replanned = not target.has_spans and config.plan.replan and config.plan.planner == "cp_sat"
    return replace(config, plan=replace(config.plan, planner="greedy")) if is_soon_replanned else config


def _failing_run(error: Exception) -> Run:
    """Return a graph that raises `error` when it is called; the frames of its traceback are cleared."""
    traceback.clear_frames(error.__traceback__)

    def fail(inputs: list[Any]) -> Sequence[Any]:
        raise error

    return fail


@functools.cache
def _warn_of_compiler(complaint: str) -> None:
    """Warn once per process that no C++ code can be compiled."""
    _logger.warning(
        "graphs run operator by operator, since no C++ code can be compiled: %s; run 'apollo doctor' to find the cause",
        complaint,
    )
