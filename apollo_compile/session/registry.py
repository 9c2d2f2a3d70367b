"""What this process has compiled and still keeps: the models of `torch.compile(..., backend="apollo")`.

register(model);    compiled_models();    find_models(model);    is_settled(model);    ways_of(model)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge.compile_context import is_part_of, original_callable
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


def find_models(model: Callable[..., Any]) -> list[CompiledModel]:
    """Return what was compiled for a module, a function or a method, whether it is the compiled one or not.

    For a module with parameters or buffers, and for its methods, these are the graphs that read any of them. For
    others they are the graphs that their code is part of, what Dynamo made of it behind a graph break included.
    """
    original = original_callable(model)
    owner = getattr(original, "__self__", original)
    if isinstance(owner, torch.nn.Module):
        own = storages_of(itertools.chain(owner.parameters(), owner.buffers()))
        if own:
            return [found for found in compiled_models() if found.storages & own]
    function = getattr(_function_of(original), "__code__", None)
    if function is None:
        return []
    return [found for found in compiled_models() if any(is_part_of(code, function) for code in found.code)]


def _function_of(run: Callable[..., Any]) -> Any:
    if isinstance(run, torch.nn.Module):
        return run.forward
    return run if hasattr(run, "__code__") else type(run).__call__


def is_settled(model: Callable[..., Any]) -> bool:
    """Return whether nothing about `model` is being decided any more: its plans are final, its comparisons are over.

    What was compiled and never called is not waited for.
    """
    models = (found for found in find_models(model) if any(graph.has_run for graph in found.current_graphs()))
    return all(each.state().stage is not Stage.MEASURING for each in models)


def variants_of(model: Callable[..., Any]) -> list[str]:
    """Return the ways that the graphs of `model` run, each once; of those that went to Inductor whole, `INDUCTOR`."""
    variants = []
    for found in find_models(model):
        for graph in found.current_graphs():
            if graph.has_run:
                is_serial = graph.variant == Variant.PLAN and not graph.compilation.plan.uses_lanes
                variants.append(Variant.SERIAL if is_serial else graph.variant)
        variants += [Variant.INDUCTOR] * len(found.fallbacks)
    return list(dict.fromkeys(variants))
