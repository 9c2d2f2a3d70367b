"""Plan a model without training it: `apollo_compile.explain`.

    explain(model, args, kwargs, options=...) -> Report

A call of the model is traced, and every graph goes through the stages up to the program; nothing is compiled
(`dry_run.py`).

Guarantees: a call of a module, or of its methods, changes neither its gradients, parameters and buffers, nor the
inputs, nor random states. Buffers, attributes and inputs are copied for the duration of the call, parameters only if a
graph writes to them. Side effects of a plain function and of hooks on other objects, and writes to parameters by code
that Dynamo does not compile, are not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apollo_compile.config import load_config
from apollo_compile.device.open import select_profile
from apollo_compile.errors import TargetError
from apollo_compile.ir import Trace, Variant
from apollo_compile.reports.outlook import Outlook, outlook_of, planned_state
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.dry_run import DryRun, trace
from apollo_compile.store.profiles import load_profile
from apollo_compile.torch_bridge.compile_context import original_callable
from apollo_compile.torch_bridge.fragments import describe_fragments

Tell = Callable[[str], None]


def explain(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    profile: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Tell | None = None,
) -> Report:
    """Return a report of the plans of a call of `model`: forward and, if gradients are needed, backward.

    Arguments:
        model: a module, compiled or not, or a function.
        args: positional arguments of the call, as a tuple.
        kwargs: keyword arguments of the call.
        profile: device to plan for, a path or a packaged name; None is this machine's CPU.
        options: as for `torch.compile(..., options=...)`.
        progress: called with lines of text that describe the progress.

    Raises:
        TargetError: the model is not callable, or it or its inputs cannot be copied.
        ConfigError: an option is unknown or has a wrong value, or a profile cannot be read.
    """
    _check_call(model, args, kwargs)
    config = load_config(options)
    if progress is not None:
        progress("tracing and planning")
    device = select_profile(config) if profile is None else load_profile(Path(profile))
    dry_run = trace(model, (tuple(args), dict(kwargs or {})), config, device)
    graphs = [
        summarize(compilation, Trace(), variant=Variant.PLAN if reason is None else Variant.INDUCTOR)
        for compilation, reason in dry_run.planned
    ]
    outlook = outlook_of(graph for graph in graphs if graph.variant is Variant.PLAN)
    return Report(
        graphs=tuple(graphs),
        fallbacks=tuple(dry_run.fallbacks),
        breaks=tuple(dry_run.breaks),
        fragments=describe_fragments(original_callable(model), len(dry_run.graphs), dry_run.breaks, is_over=True),
        states=tuple(_state(dry_run, name, outlook) for name in dry_run.graphs),
    )


def _check_call(model: object, args: object, kwargs: object) -> None:
    if not callable(model):
        raise TargetError(f"cannot plan a {type(model).__name__}: expected a module, or a function of tensors")
    if not isinstance(args, tuple | list):
        raise TargetError(f"args is a {type(args).__name__}: expected a tuple, as in explain(model, (x,))")
    if not isinstance(kwargs, Mapping | None):
        raise TargetError(
            f"kwargs is a {type(kwargs).__name__}: expected a mapping; positional arguments are one tuple, as in "
            "explain(model, (x, y), {'mask': mask})"
        )


def _state(dry_run: DryRun, name: str, outlook: Outlook | None) -> State:
    """Return the state of a Dynamo graph: planned, or falls back with reasons."""
    if any(reason is None for _, reason in dry_run.graphs[name]):
        return planned_state(name, outlook)
    reasons = [reason for graph, reason in dry_run.fallbacks if graph == name]
    return State(graph=name, stage=Stage.FALLS_BACK, detail="; ".join(reasons))
