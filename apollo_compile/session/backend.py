"""Compile a Dynamo graph as the backend does: `compile_dynamo_graph`, for graphs of models and of training steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from apollo_compile.config import Config, load_config
from apollo_compile.device.open import open_target
from apollo_compile.distributed.ranks import find_ranks
from apollo_compile.errors import ApolloError
from apollo_compile.session.compile import GraphCompiler
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.registry import describe_calls, models_of_call, num_graphs_of, register
from apollo_compile.torch_bridge.compile_context import called_now, name_dynamo_graph, recompile_reason, traced_code
from apollo_compile.torch_bridge.dynamo_graph import traced_tensors
from apollo_compile.torch_bridge.frontend import compile_plainly, is_for_dynamo, keep_with
from apollo_compile.torch_bridge.graph_breaks import find_break
from apollo_compile.torch_bridge.settings import inductor_settings
from apollo_compile.torch_bridge.storages import storages_of
from apollo_compile.torch_bridge.traced_backward import refuse_hooks
from apollo_compile.torch_bridge.upstream_bugs.kept_symbols import release_symbols_with

_logger = logging.getLogger(__name__)


def compile_dynamo_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    is_for_step: bool = False,
) -> tuple[Callable[..., Any], CompiledModel | None]:
    """Return the compiled function of `apollo` and its model, which is None if the backend is disabled.

    With `is_for_step`, graphs are compiled in segments also where Inductor is as fast, to be linked into a step.
    """
    config = load_config(options)
    if config.debug.log is not None:
        _set_log_level(config.debug.log)
    settings = inductor_settings(config.mode if mode is None else mode, config.inductor)
    if config.disable:
        return compile_plainly(graph_module, example_inputs, settings), None
    model: CompiledModel | None = None
    try:
        model = _model_of(graph_module, example_inputs, config, is_for_step=is_for_step)
        compiled = GraphCompiler(model, settings).compile(graph_module, example_inputs)
    except Exception as error:
        is_ours = model is None or not model.falls_back
        if not is_ours or config.debug.strict or isinstance(error, ApolloError) or is_for_dynamo(error):
            raise
        _logger.warning("torch.compile alone runs a graph, since apollo failed: %s: %s", type(error).__name__, error)
        return compile_plainly(graph_module, example_inputs, settings), None
    model.target.trim_memory()  # free memory from compiling
    keep_with(compiled, model)
    register(model)
    _warn_of_fragments(model)
    return compiled, model


def _model_of(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, *, is_for_step: bool
) -> CompiledModel:
    """Return the model of a Dynamo graph, of which nothing is compiled yet."""
    tensors = traced_tensors(graph_module, example_inputs)
    refuse_hooks(graph_module, tensors)
    target, without_lanes = open_target(example_inputs, config)
    name, called = name_dynamo_graph(), called_now()
    model = CompiledModel(
        name=name,
        again=f" again, since {reason}" if (reason := recompile_reason()) else "",
        config=config,
        target=target,
        without_lanes=without_lanes,
        storages=storages_of(tensors),
        code=traced_code(),
        called=called,
        kind=None if called is None else type(called()),
        num_before=num_graphs_of(called, besides=name),
        ranks=find_ranks(),
        is_for_step=is_for_step,
    )
    release_symbols_with(model)
    model.graph_break = find_break(graph_module, model.name)
    return model


def _warn_of_fragments(model: CompiledModel) -> None:
    """Warn once per module or function that it falls into many graphs, as soon as there are many."""
    called = None if model.called is None else model.called()
    if called is None or any(each.has_warned for each in models_of_call(called)):
        return
    line = describe_calls([model], are_over=False)
    if line:
        _logger.warning("%s", line)
        model.has_warned = True


def _set_log_level(level: str) -> None:
    logger = logging.getLogger("apollo_compile")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():  # without a handler, nothing would be shown
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
