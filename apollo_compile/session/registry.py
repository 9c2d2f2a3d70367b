"""What this process has compiled and still keeps: the models of `torch.compile(..., backend="apollo")`.

register(model);    compiled_models();    find_models(module);    is_settled(module);    ways_of(module)
"""

from __future__ import annotations

import itertools
import weakref

import torch

from apollo_compile.ir import Variant
from apollo_compile.reports.report import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge.storages import storages_of

_models: weakref.WeakValueDictionary[int, CompiledModel] = weakref.WeakValueDictionary()
"""Compiled models by age; each lives as long as Dynamo keeps the function that was compiled for it."""

_ages = itertools.count()


def register(model: CompiledModel) -> None:
    """Let a model be found for as long as somebody keeps it."""
    _models[next(_ages)] = model


def compiled_models() -> list[CompiledModel]:
    """Return what this process has compiled and still keeps, oldest first."""
    return [model for _, model in sorted(_models.items())]


def find_models(module: torch.nn.Module) -> list[CompiledModel]:
    """Return what was compiled for `module`: the graphs that read its parameters or buffers."""
    own = storages_of(itertools.chain(module.parameters(), module.buffers()))
    return [model for model in compiled_models() if model.storages & own]


def is_settled(module: torch.nn.Module) -> bool:
    """Return whether nothing about `module` is being decided any more: its plans are final, its contests are over.

    What was compiled and never called is not waited for.
    """
    models = (model for model in find_models(module) if any(graph.has_run for graph in model.current_graphs()))
    return all(model.state().stage is not Stage.MEASURING for model in models)


def ways_of(module: torch.nn.Module) -> list[str]:
    """Return the ways that the graphs of `module` run, each once; of those that went to Inductor whole, `INDUCTOR`."""
    ways = []
    for model in find_models(module):
        for graph in model.current_graphs():
            if graph.has_run:
                is_in_turn = graph.way == Variant.PLAN and not graph.compilation.plan.uses_lanes
                ways.append(Variant.SERIAL if is_in_turn else graph.way)
        ways += [Variant.INDUCTOR] * len(model.handed_over)
    return list(dict.fromkeys(ways))
