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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.config import load_config
from apollo_compile.device.open import select_profile
from apollo_compile.errors import TargetError
from apollo_compile.ir import Plan, Trace, Variant
from apollo_compile.reports.outlook import Outlook, outlook_of, planned_state
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import GraphSummary, Stage, State, WhatIf
from apollo_compile.session.dry_run import DryRun, trace
from apollo_compile.session.private_copy import with_batch
from apollo_compile.target.compilation import Compilation
from apollo_compile.tools.what_if import what_if
from apollo_compile.torch_bridge.compile_context import original_callable
from apollo_compile.torch_bridge.fragments import describe_fragments

Progress = Callable[[str], None]


def explain(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    units: Sequence[int] = (),
    profiles: Sequence[str] = (),
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> Report:
    """Return a report of the plans of a call of `model`: forward and, if gradients are needed, backward.

    Arguments:
        model: a module, compiled or not, or a function.
        args: positional arguments of the call, as a tuple.
        kwargs: keyword arguments of the call.
        options: as for `torch.compile(..., options=...)`.
        units: numbers of units to compare with. Every comparison plans all graphs again.
        profiles: device profiles to compare with, paths or packaged names.
        batches: batch sizes to compare with; inputs are repeated or truncated along their first dimension.
        progress: called with lines of text that describe the progress.

    Raises:
        TargetError: the model is not callable, it or its inputs cannot be copied, or `batches` are given and the inputs
            have no batch dimension.
        ConfigError: an option is unknown or has a wrong value, a profile cannot be read, or `units` has a number below
            1.
    """
    _check_call(model, args, kwargs)
    tell = progress or _ignore
    config = load_config(options)
    tell("tracing and planning")
    dry_run = trace(model, (tuple(args), dict(kwargs or {})), config, select_profile(config))
    graphs = []
    for compilation, reason in dry_run.planned:
        if units or profiles:
            tell(f"{compilation.partition.graph.name}: planning on other devices")
        graphs.append(
            summarize(
                compilation,
                Trace(),
                variant=Variant.PLAN if reason is None else Variant.INDUCTOR,
                what_if=what_if(compilation, config, units=units, profiles=profiles),
            )
        )
    outlook = outlook_of(graph for graph in graphs if graph.variant is Variant.PLAN)
    report = Report(
        graphs=tuple(graphs),
        fallbacks=tuple(dry_run.fallbacks),
        breaks=tuple(dry_run.breaks),
        fragments=describe_fragments(original_callable(model), len(dry_run.graphs), dry_run.breaks, is_over=True),
        states=tuple(_state(dry_run, name, outlook) for name in dry_run.graphs),
    )
    return compare_batches(report, model, args, kwargs, options=options, batches=batches, progress=progress)


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


def compare_batches(
    report: Report,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    options: Mapping[str, Any] | None,
    batches: Sequence[int],
    progress: Progress | None = None,
) -> Report:
    """Return `report` with a row per batch size in `batches`.

    The model is traced and planned for each batch size, with durations from formulas: measurements of one batch size do
    not apply to another.

    Raises:
        TargetError: the inputs have no batch dimension.
        ConfigError: an option is unknown or has a wrong value.
    """
    tell = progress or _ignore
    config = load_config(options)
    profile = select_profile(config)
    not_dumped = replace(config, debug=replace(config.debug, dump=None))  # the dump directory is for the original batch
    graphs = list(report.graphs)
    for batch in batches:
        tell(f"batch {batch}: tracing and planning")
        resized = with_batch((tuple(args), dict(kwargs or {})), batch)
        traced = [compilation for compilation, _ in trace(model, resized, not_dumped, profile).planned]
        for index, plan in _match(report.graphs, traced):
            row = WhatIf(
                change=f"batch {batch}",
                batch=batch,
                units=profile.units,
                serial_ns=plan.serial_ns,
                predicted_ns=plan.makespan_ns,
                num_abreast=plan.num_abreast,
            )
            graphs[index] = replace(graphs[index], what_if=(*graphs[index].what_if, row))
    return replace(report, graphs=tuple(graphs))


def _match(graphs: Sequence[GraphSummary], traced: Sequence[Compilation]) -> Iterator[tuple[int, Plan]]:
    """Yield the index of each graph of a report with the plan of the traced graph for the same part of the model.

    Names differ between traces, and a report may contain only some graphs of a model, or several for other inputs. So
    graphs are matched by role and modules; ties are matched in order.
    """
    modules = [{segment.module for segment in item.partition.graph.segments} for item in traced]
    num_used = [0] * len(traced)
    for index, graph in enumerate(graphs):
        own = {segment.module for segment in graph.segments}
        shared = [
            len(own & names) / len(own | names) if item.capture.role is graph.role else 0.0
            for item, names in zip(traced, modules, strict=True)
        ]
        best = max(range(len(traced)), key=lambda place: (shared[place], -num_used[place]), default=None)
        if best is not None and shared[best] > 0:
            num_used[best] += 1
            yield index, traced[best].plan


def _ignore(line: str) -> None:
    """Ignore a line of progress."""
