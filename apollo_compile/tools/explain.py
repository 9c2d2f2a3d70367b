"""Plan a model without training it.

    explain(model, *args, **kwargs) -> Report
    plan_model(model, args, kwargs, options=..., batches=...) -> Report     the same, with options

Dynamo traces the model, and every graph goes through the stages up to the program, forward and backward; nothing is
compiled. The graphs then run in eager, once, so that code behind a graph break sees real numbers.

Guarantees: a module, its gradients, parameters and buffers, the inputs and all random states are as they were, also
when it is one of its methods that is called: a copy runs, with tensors of its own, which takes the memory of another
model for as long as the call lasts. A plain function runs as it is, and what it changes stays changed; so does what
hooks do elsewhere.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from apollo_compile.config import Config, load_config
from apollo_compile.device.open import select_profile
from apollo_compile.device.profile import DeviceProfile
from apollo_compile.device.target import Run
from apollo_compile.errors import TargetError, UnsupportedGraphError
from apollo_compile.ir import GraphBreak, Plan, Role, Trace, Variant
from apollo_compile.pipeline import Compilation
from apollo_compile.reports.report import Report, Stage, State
from apollo_compile.reports.summary import GraphSummary, WhatIf, summarize
from apollo_compile.session.planning import plan_graph, reason_to_fall_back, role_of
from apollo_compile.tools.targets import tensors_of
from apollo_compile.tools.what_if import PROFILES, what_if
from apollo_compile.torch_bridge.compile_ids import name_dynamo_graph
from apollo_compile.torch_bridge.graph_breaks import find_break
from apollo_compile.torch_bridge.inductor import (
    adopt_layouts,
    compile_with_inductor,
    inductor_settings,
    with_settings,
)

Progress = Callable[[str], None]


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Return how `model(*args, **kwargs)` would be planned: forward and, where gradients are needed, backward.

    Options are those of the environment, as for `torch.compile(model, backend="apollo")`; `plan_model` takes others,
    and batch sizes to compare with.

    Raises:
        TargetError: the model or its inputs cannot be copied.
        ConfigError: an environment variable has a wrong value.
    """
    return plan_model(model, args, kwargs)


def plan_model(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    units: Sequence[int] | None = None,
    profiles: Sequence[str] = PROFILES,
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> Report:
    """Return how a call of `model` would be planned.

    Arguments:
        model: a module, compiled or not, or a function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        options: as for `torch.compile(..., options=...)`.
        units: numbers of units to compare with; None is half, twice and four times as many as there are.
        profiles: device profiles to compare with, paths or packaged names.
        batches: batch sizes to compare with: inputs are repeated or cut along their first dimension.
        progress: called with a line of text now and then.

    Raises:
        TargetError: the model cannot be called, it or its inputs cannot be copied, or they have no batch dimension
            though `batches` are given.
        ConfigError: an option is unknown or has a wrong value, a profile cannot be read, or there are to be no units.
    """
    if not callable(model):
        raise TargetError(f"cannot plan a {type(model).__name__}: expected a module, or a function of tensors")
    tell = progress or _tell_nobody
    config = load_config(options)
    profile = select_profile(config)
    call = (tuple(args), dict(kwargs or {}))
    tell("tracing and planning")
    tracer = _trace(model, call, config, profile)
    graphs = []
    for compilation, reason in tracer.planned:
        tell(f"{compilation.partition.graph.name}: planning on other devices")
        rows = what_if(compilation, config, units=units, profiles=profiles)
        graphs.append(replace(tracer.summarize(compilation, reason), what_if=rows))
    report = Report(
        graphs=tuple(graphs),
        handed_over=tuple(tracer.handed_over),
        breaks=tuple(tracer.breaks),
        states=tuple(map(tracer.state, tracer.graphs)),
    )
    return compare_batches(report, model, args, kwargs, options=options, batches=batches, progress=progress)


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
    """Return the report of a call of `model` with other batch sizes to compare with.

    The model is traced and planned for each of them. What was measured on one batch says nothing about the kernels of
    another, so these rows rest on formulas alone.

    Raises:
        TargetError: the inputs have no batch dimension.
        ConfigError: an option is unknown or has a wrong value.
    """
    tell = progress or _tell_nobody
    config = load_config(options)
    profile = select_profile(config)
    not_dumped = replace(config, debug=replace(config.debug, dump=None))  # the directory has the plans asked for
    graphs = list(report.graphs)
    for batch in batches:
        tell(f"batch {batch}: tracing and planning")
        resized = _with_batch((tuple(args), dict(kwargs or {})), batch)
        traced = [compilation for compilation, _ in _trace(model, resized, not_dumped, profile).planned]
        for index, plan in _match(report.graphs, traced):
            row = WhatIf(
                change=f"batch {batch}",
                batch=batch,
                units=profile.units,
                serial_ns=plan.serial_ns,
                predicted_ns=plan.makespan_ns,
            )
            graphs[index] = replace(graphs[index], what_if=(*graphs[index].what_if, row))
    return replace(report, graphs=tuple(graphs))


def _match(graphs: Sequence[GraphSummary], traced: Sequence[Compilation]) -> Iterator[tuple[int, Plan]]:
    """Yield the index of each graph of a report with the plan of the graph that is the same part of the model.

    Each trace has names of its own, and a report may have graphs of a model in part, or again for other inputs. So a
    graph is known by its role and by its modules, and those that have these in common by their order.
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


def _tell_nobody(line: str) -> None:
    """Take a line of progress that nobody asked for."""


@dataclass(kw_only=True, slots=True)
class _Tracer:
    """Stands where the backend stands: plans what Dynamo and AOTAutograd hand over, and runs it in eager."""

    config: Config
    profile: DeviceProfile
    graphs: dict[str, list[tuple[Compilation, str | None]]] = field(default_factory=dict)
    """By the name of their Dynamo graph, each with the reason where Inductor would get it."""
    handed_over: list[tuple[str, str]] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take a Dynamo graph."""
        name = name_dynamo_graph()
        self.graphs[name] = []
        found = find_break(graph_module, name)
        if found is not None:
            self.breaks.append(found)
        settings = inductor_settings(self.config.mode, self.config.inductor)
        with with_settings(settings):
            return compile_with_inductor(
                graph_module,
                example_inputs,
                partial(self._plan, name),
                recompute_masks=self.config.runtime.recompute_masks,
                backward_at_once=True,
                settings=settings,
            )

    def summarize(self, compilation: Compilation, reason: str | None) -> GraphSummary:
        """Return the numbers of one plan."""
        return summarize(
            compilation,
            Trace(),
            way=Variant.PLAN if reason is None else Variant.INDUCTOR,
        )

    @property
    def planned(self) -> list[tuple[Compilation, str | None]]:
        """All graphs, forward before backward."""
        return [
            item
            for graphs in self.graphs.values()
            for item in sorted(graphs, key=lambda item: item[0].capture.role is Role.BACKWARD)
        ]

    def state(self, name: str) -> State:
        """Return whether the graphs of a Dynamo graph were planned, or why it falls back."""
        if any(reason is None for _, reason in self.graphs[name]):
            return State(graph=name, stage=Stage.PLANNED, detail="nothing was run")
        reasons = [reason for graph, reason in self.handed_over if graph == name]
        return State(graph=name, stage=Stage.FALLS_BACK, detail="; ".join(reasons))

    def _plan(
        self, dynamo_name: str, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[Run, None]:
        role = role_of(kwargs)
        if role is Role.BACKWARD and dynamo_name in dict(self.handed_over):  # it falls back with its forward
            return _run_in_eager(graph_module), None
        graph_name = f"{dynamo_name} {role}"
        subject = graph_name if role is Role.BACKWARD else dynamo_name
        try:
            adopt_layouts(graph_module, example_inputs)
            compilation = plan_graph(graph_module, name=graph_name, role=role, profile=self.profile, config=self.config)
        except UnsupportedGraphError as error:
            self.handed_over.append((subject, str(error)))
        except Exception as error:  # the backend goes on with Inductor then, so this is what would happen
            if self.config.debug.strict:
                raise
            self.handed_over.append((subject, f"{type(error).__name__}: {error}"))
        else:
            reason = reason_to_fall_back(compilation, self.config)
            self.graphs[dynamo_name].append((compilation, reason))
            if reason is not None:
                self.handed_over.append((subject, reason))
        return _run_in_eager(graph_module), None


def _trace(
    model: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    config: Config,
    profile: DeviceProfile,
) -> _Tracer:
    tracer = _Tracer(config=config, profile=profile)
    args, kwargs = _copy(call, "the inputs", "pass tensors that are leaves: call detach() on them")
    runs = _copy_model(getattr(model, "_orig_mod", model))
    # Own cache entries, so that neither those of the user's compiled model nor its limit of recompiles are touched.
    compile_model: Callable[..., Callable[..., Any]] = torch.compile
    own_entries = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    tracers = [tracer]

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return tracers[0].compile(graph_module, example_inputs)

    try:
        with _same_random_states():
            compile_model(runs, backend=compile_graph, dynamic=False, **own_entries)(*args, **kwargs)
    finally:
        tracers.clear()  # Dynamo remembers backends for good; it is not to keep the plans as well
    if not tracer.graphs:
        raise TargetError(
            "Dynamo found nothing to compile: expected a call that runs operators of torch on its inputs, in a process "
            "in which Dynamo is on (see TORCHDYNAMO_DISABLE and torch.compiler.set_stance)"
        )
    return tracer


def _run_in_eager(graph_module: fx.GraphModule) -> Run:
    def run(inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        outputs: Sequence[Any] = graph_module(*values)
        return outputs

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# ---------------------------------------------------------------------------------------------------------- copies


def _copy_model(model: Callable[..., Any]) -> Callable[..., Any]:
    owner = getattr(model, "__self__", model)
    if not isinstance(owner, nn.Module):
        return model
    copied: Callable[..., Any] = _copy(
        model, f"the model, a {type(owner).__name__},", "see what it holds besides tensors"
    )
    return copied


def _copy(value: Any, what: str, advice: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise TargetError(
            f"cannot copy {what} to plan it without side effects: {type(error).__name__}: {error}; {advice}"
        ) from error


@contextmanager
def _same_random_states() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _with_batch(call: tuple[tuple[Any, ...], dict[str, Any]], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with inputs of another batch size: the first dimension that most tensors have."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_of(call) if tensor.dim() > 0)
    if not sizes or batch < 1:
        raise TargetError(f"cannot try batch {batch}: expected a batch of at least 1 and inputs with a first dimension")
    size = sizes.most_common(1)[0][0]
    changed: tuple[tuple[Any, ...], dict[str, Any]] = _resize(call, size, batch)
    return changed


def _resize(value: Any, size: int, batch: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != size:
            return value
        picked = value.detach()[torch.arange(batch, device=value.device) % size]
        return picked.requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _resize(item, size, batch) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_resize(item, size, batch) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
