"""Report how compiled models run: `apollo_compile.report`, and its first line, `apollo_compile.status`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.errors import TargetError
from apollo_compile.ir import Role, Trace, Variant
from apollo_compile.reports.report import Report, merge_reports
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import GraphSummary, State
from apollo_compile.reports.words import NOTHING_YET, describe_state
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.registry import compiled_models, describe_calls, find_models, models_of_class
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.step import Step
from apollo_compile.torch_bridge.compile_context import owner_of


def report(model: Callable[..., Any] | Step | None = None) -> Report:
    """Return a report of a compiled model, with measurements of its last step; it prints as text.

    Arguments:
        model: a module, a function or a method, compiled or original. Graphs of a module are found by the parameters
            and buffers that they read; graphs of a function, or of a module without parameters and buffers, by its
            code. A compiled module without graphs of its own has those of other instances of its class, whose code
            Dynamo shares; the state says so. For a step of `compile_step`, its programs are reported. None reports all
            live compiled models, as needed for FSDP2, where graphs read gathered copies of parameters.

    Raises:
        TargetError: `model` is not callable.
    """
    if isinstance(model, Step):
        return _report_step(model)
    found, note = _find(model, "report")
    counted = _with_state(found)
    merged = merge_reports(
        Report(
            graphs=tuple(_summarize(entry)),
            fallbacks=tuple(entry.fallbacks),
            verdicts=tuple(entry.verdicts),
            breaks=() if entry.graph_break is None else (entry.graph_break,),
            states=_report_state(entry.state(), note).states if entry in counted else (),
        )
        for entry in found
    )
    return replace(merged, fragments=describe_calls(found))


def _report_step(step: Step) -> Report:
    """Return a report of the programs of a step; batches that run as a loop are fallbacks."""
    programs = [
        Report(
            graphs=(_summarize_step(tuner),),
            fallbacks=(),
            verdicts=() if tuner.verdict is None else ((tuner.program.name, tuner.verdict),),
            states=(tuner.state,),
        )
        for tuner in step.tuners
    ]
    return merge_reports([*programs, *map(_report_state, step.states_beside_programs)])


def _summarize_step(tuner: StepTuner) -> GraphSummary:
    variants = tuner.program.variants
    return summarize(variants.compilation, variants.plan.trace(), variant=tuner.current)


def status(model: Callable[..., Any] | None = None) -> str:
    """Return the state of autotuning in one line, the first line of `report`, without making a report.

    It begins with `measuring`, `settled` or `falls back`, as in `measuring, about 60 steps (20 s) left: plan 41.2 ms,
    segments in turn 44.0 ms` and `settled after 128 measured steps: 1.42x as fast as torch.compile (plan on 2 lanes)`.
    If nothing has been compiled yet, it says so. The `repr` of a step of `compile_step` has the same line.

    Arguments:
        model: as for `report`.

    Raises:
        TargetError: `model` is not callable.
    """
    if isinstance(model, Step):
        reports = [_report_state(state) for state in model.states]
    else:
        found, note = _find(model, "status")
        reports = [_report_state(entry.state(), note) for entry in _with_state(found)]
    return describe_state(merge_reports(reports).states) or NOTHING_YET


def _with_state(models: Sequence[CompiledModel]) -> Sequence[CompiledModel]:
    """Return the models without those whose only call raised, if another one has run."""
    return [model for model in models if model.fallbacks or any(graph.has_run for graph in model.graphs)] or models


def _report_state(state: State, note: str = "") -> Report:
    detail = "; ".join(filter(None, (state.detail, note)))
    return Report(graphs=(), fallbacks=(), states=(replace(state, detail=detail),))


def _find(model: Callable[..., Any] | None, what: str) -> tuple[list[CompiledModel], str]:
    """Return the compiled models of a model, and a note on its state; mostly empty."""
    if model is not None and not callable(model):
        raise TargetError(
            f"there is no {what} of a {type(model).__name__}: expected a compiled module or function; {what}() without "
            "arguments covers everything that was compiled"
        )
    found = compiled_models() if model is None else find_models(model)
    if found or model is None:
        return found, ""
    return models_of_class(model), f"compiled for another instance of {type(owner_of(model)).__name__}"


def _summarize(model: CompiledModel) -> list[GraphSummary]:
    """Return the summaries of a model's graphs, including planned fallbacks, forward before backward."""
    quota = model.target.lane_memory_quota
    graphs = [
        summarize(
            graph.compilation,
            Trace() if graph.learner.is_cold else graph.trace(),
            num_replans=graph.num_replans,
            is_cold=graph.learner.is_cold and graph.variant_of_plan == Variant.PLAN,
            is_deterministic=graph.is_deterministic,
            variant=graph.variant_of_plan,
            lane_bytes=graph.lane_bytes(),
            lane_memory_quota=quota,
        )
        for graph in model.graphs
    ]
    graphs += [
        summarize(compilation, Trace(), variant=Variant.INDUCTOR, lane_memory_quota=quota)
        for compilation in model.unprofitable
    ]
    return sorted(graphs, key=lambda graph: graph.role is Role.BACKWARD)
