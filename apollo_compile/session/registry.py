"""Registry of the models that `torch.compile(..., backend="apollo")` compiled, as long as Dynamo keeps them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.torch_bridge.compile_context import code_of, is_compiled, is_part_of, original_callable, owner_of
from apollo_compile.torch_bridge.fragments import describe_fragments
from apollo_compile.torch_bridge.storages import storages_of

_models: weakref.WeakValueDictionary[int, CompiledModel] = weakref.WeakValueDictionary()
"""Compiled models in the order of their compiles; each lives as long as Dynamo keeps the compiled function."""

_ages = itertools.count()


def register(model: CompiledModel) -> None:
    """Register a model, by a weak reference."""
    _models[next(_ages)] = model


def compiled_models() -> list[CompiledModel]:
    """Return the compiled models that are still alive, oldest first."""
    return [model for _, model in sorted(_models.items())]


def find_models(model: Callable[..., Any]) -> list[CompiledModel]:
    """Return the compiled models of a module, a function or a method; it may be the original or the compiled one.

    A module with parameters or buffers, or a method of it, is found by graphs that read any of them, else by its call
    (`load_state_dict(assign=True)` exchanges all). Anything else is found by its code, including the resume functions
    that Dynamo makes after a graph break.
    """
    original, owner = original_callable(model), owner_of(model)
    if isinstance(owner, torch.nn.Module):
        own = storages_of(itertools.chain(owner.parameters(), owner.buffers()))
        if own:
            return [found for found in compiled_models() if found.storages & own] or models_of_call(owner)
    called: Any = original.forward if isinstance(original, torch.nn.Module) else original
    function = getattr(called if hasattr(called, "__code__") else type(called).__call__, "__code__", None)
    if function is None:
        return []
    return [found for found in compiled_models() if any(is_part_of(code, function) for code in found.code)]


def models_of_call(called: Callable[..., Any]) -> list[CompiledModel]:
    """Return the compiled models that `torch.compile(called)` made."""
    return [model for model in compiled_models() if model.called is not None and model.called() is called]


def models_of_class(model: Callable[..., Any]) -> list[CompiledModel]:
    """Return the compiled models of the class of a compiled module, any of which its calls may run; often empty."""
    owner = owner_of(model)
    is_shared = isinstance(owner, torch.nn.Module) and is_compiled(model)
    return [found for found in compiled_models() if is_shared and found.kind is type(owner)]


def num_graphs_of(called: weakref.ref[Callable[..., Any]] | None, *, besides: str) -> int:
    """Return the number of graphs of a call so far, without those from the code of the graph `besides`."""
    run = None if called is None else called()
    if run is None:
        return 0
    return len({code_of(model.name) for model in models_of_call(run)} - {code_of(besides)})


def describe_calls(models: Iterable[CompiledModel], *, are_over: bool = True) -> str:
    """Return a line for each call of `torch.compile` that fell into many graphs, these among them; often empty."""
    lines = []
    calls = [model.called() for model in models if model.called is not None]
    for called in {id(call): call for call in calls if call is not None}.values():
        own = {code_of(model.name): model for model in models_of_call(called)}
        breaks = [model.graph_break for model in own.values() if model.graph_break is not None]
        lines.append(describe_fragments(called, len(own), breaks, is_over=are_over))
    return "\n".join(filter(None, lines))


def is_settled(model: Callable[..., Any]) -> bool:
    """Return whether the plans of `model` are final and its comparisons are over.

    Models that were compiled but never called are ignored.
    """
    models = (each for each in find_models(model) if any(graph.has_run for graph in each.graphs))
    return all(each.state().stage is not Stage.MEASURING for each in models)


def variants_of(model: Callable[..., Any]) -> list[str]:
    """Return the variants that the graphs of `model` run, each once; for fallbacks, `INDUCTOR`."""
    variants = []
    for found in find_models(model):
        variants += found.running_variants() + [Variant.INDUCTOR] * len(found.fallbacks)
    return list(dict.fromkeys(variants))
