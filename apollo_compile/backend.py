"""What `torch.compile(model, backend="apollo")` calls.

Dynamo hands over a graph; Inductor's front half turns it into a forward and a backward, or an inference graph; each of
them becomes a `CompiledGraph`: a Compilation (the products), its compiled bodies and an Executable.

Note [fallback]: a Dynamo graph that segments cannot express, or that would gain nothing from them, gets exactly what
`torch.compile(mode=..., options=...)` makes of it: same code, same caches, same memory. One INFO line says why.
Whether it falls back is known when its forward, or inference graph, has been planned. AOTAutograd has traced it by
then, with settings of ours; so what was made is dropped, and the Dynamo graph, of which AOTAutograd had a copy, is
compiled again. Where AOTAutograd's cache is in use, the reason is kept there, so that a later process knows it without
planning. A backward that cannot run in segments though its forward does is compiled whole by Inductor, and so is one of
the two where measurements said that this is the best for it alone.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from apollo_compile.config import Config, load_config
from apollo_compile.device.cpu.execute import (
    available_units,
    core_share,
    keep_memory,
    most_units,
    start_lanes,
    trim_memory,
)
from apollo_compile.device.gpu.execute import Contract, ModelMemory
from apollo_compile.device.gpu.gpu import Gpu, TorchGpu
from apollo_compile.device.profile import (
    DeviceProfile,
    discover_gpu_profile,
    discover_profile,
    gpu_fingerprint,
    limit_units,
    load_profile,
    packaged_profiles,
)
from apollo_compile.distributed.agreement import Commons
from apollo_compile.distributed.ranks import Ranks, find_ranks
from apollo_compile.errors import (
    ConfigError,
    CudaError,
    NothingToGainError,
    RankError,
    TargetError,
    UnsupportedGraphError,
)
from apollo_compile.ir import BodyId, Capture, GraphBreak, Partition, Plan, Role, Trace, Variant, Verdict, check, text
from apollo_compile.ir.text import format_count
from apollo_compile.observe import StageRunner, warn_of_files
from apollo_compile.passes.capture import capture_graph, read_formulas, resize_capture
from apollo_compile.pipeline import (
    Compilation,
    compile_capture,
    compile_finding,
    compile_sizes,
    rename,
)
from apollo_compile.progress import Progress
from apollo_compile.reports.report import Report, Stage, State, merge_reports
from apollo_compile.reports.summary import GraphSummary, summarize
from apollo_compile.session.autotune import MIN_ROUNDS, Selection
from apollo_compile.session.buckets import GraphFamily, at_once, in_background
from apollo_compile.session.bundle import FallbackBundle, SegmentsBundle, WholeBundle
from apollo_compile.session.graph import CompiledGraph, has_free_plans, uses_lanes
from apollo_compile.session.warm_start import WarmStart, may_be_contested
from apollo_compile.store.history import Finding
from apollo_compile.store.plan_file import FILE_NAME, save_plan
from apollo_compile.tools.what_if import PROFILES, what_if
from apollo_compile.torch_bridge.graph_breaks import find_break
from apollo_compile.torch_bridge.inductor import (
    Boundary,
    Bundle,
    Cache,
    CompiledBody,
    Run,
    adopt_layouts,
    bundle_body,
    bundle_code,
    bundle_graph,
    clone_graph,
    compile_again,
    compile_bodies,
    compile_plainly,
    compile_whole,
    compile_with_inductor,
    compiler_complaint,
    copy_of_dynamo_graph,
    current_settings,
    depends_on_units,
    extract_body,
    find_uncapturable,
    inductor_settings,
    interpret_bodies,
    interpret_whole,
    is_for_dynamo,
    keep_with,
    may_choose_library,
    real_tensors,
    release_symbols_with,
    report_output_strides,
    reset_cuda_graphs,
    set_aside,
    shared_kwargs,
    storages_of,
    trace_artifact,
    traced_tensors,
    unbundle_body,
    unbundle_code,
    unbundle_graph,
    user_outputs,
    with_settings,
    writes_inputs,
    written_inputs,
)
from apollo_compile.torch_bridge.onednn import Matmul, find_matmuls, give_to_onednn, libraries_in
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

WRAPPER_NS_PER_KERNEL = 8_000
"""What Inductor's Python wrapper takes per kernel, about; the C++ wrapper of a body takes less than a tenth of it."""

WORTH_NATIVE = 0.05
"""Share of that in a graph's predicted time from which segments are compiled though nothing else speaks for them."""

NOT_RUN = Trace(spans=(), duration_ns=0)

_graph_numbers: dict[Path | None, itertools.count[int]] = defaultdict(itertools.count)
"""Numbers of Dynamo graphs by dump directory, so that two compiles into two directories dump the same."""


def apollo(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that independent modules share the device.

    Arguments:
        graph_module: what Dynamo traced.
        example_inputs: its inputs.
        options: see `apollo_compile.config`; `torch.compile(..., options={"plan.planner": "serial"})`. Those of
            Inductor come behind `inductor.`.
        mode: one of Inductor's, whose settings hold for bodies of segments and for what falls back.

    Raises:
        ConfigError: an option, environment variable or mode is unknown or has a wrong value.
    """
    config = load_config(options)
    if config.debug.log is not None:
        _set_log_level(config.debug.log)
    settings = inductor_settings(config.mode if mode is None else mode, config.inductor)
    if config.disable:
        return compile_plainly(graph_module, example_inputs, settings)
    _log_share()
    if config.device.units is None and not any(_is_elsewhere(value) for value in example_inputs):
        _warn_without_lanes()
    gpu = _open_gpu(example_inputs, config)
    model = CompiledModel(
        number=next(_graph_numbers[config.debug.dump]),
        config=config,
        profile=select_profile(config) if gpu is None else _gpu_profile(gpu, config),
        device=_CPU if gpu is None else gpu.device,
        gpu=gpu,
        storages=storages_of(traced_tensors(graph_module, example_inputs)),
        ranks=find_ranks(),
    )
    release_symbols_with(model)
    model.ended_by = find_break(graph_module, model.name)
    compiled = model.compile(graph_module, example_inputs, settings)
    if config.runtime.keep_memory:
        trim_memory()  # compiling left much behind
    keep_with(compiled, model)
    _models[next(_ages)] = model
    return compiled


apollo.reset = reset_cuda_graphs  # type: ignore[attr-defined]


@dataclass(eq=False)
class CompiledModel:
    """All graphs that come from one Dynamo graph, and why some of them are Inductor's."""

    number: int
    config: Config
    profile: DeviceProfile
    storages: frozenset[Hashable]
    """Of the tensors that it was compiled for; a module's parameters are among them, so a report finds it."""
    graphs: list[CompiledGraph] = field(default_factory=list)
    contested: list[CompiledGraph] = field(default_factory=list)
    """Those of them whose way is decided by measuring, in common."""
    families: list[GraphFamily[CompiledGraph]] = field(default_factory=list)
    """Of those with dynamic shapes, the plans by bucket of sizes; their graphs are among `graphs` too."""
    device: torch.device = _CPU
    """Where its tensors are, if it is to run on lanes."""
    gpu: Gpu | None = None
    """The lanes' device; None for CPU lanes."""
    memories: dict[str, ModelMemory] = field(default_factory=lambda: defaultdict(ModelMemory))
    """By way, what the graphs share on a GPU."""
    handed_over: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of what Inductor runs: the Dynamo graph where that falls back, else a graph of it."""
    falls_back: bool = False
    """Whether the Dynamo graph is to be compiled as by torch.compile alone: Note [fallback]."""
    left: list[Compilation] = field(default_factory=list)
    """Those of them that have a plan, but one that is not worth compiling."""
    ended_by: GraphBreak | None = None
    """What broke the Dynamo graph off; None where it ended with the function."""
    ranks: Ranks = field(default_factory=lambda: Ranks(None))
    """Who decides with this process."""
    selection: Selection = field(init=False)
    warm_start: WarmStart = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the contest of the graphs to come, and what they take over from earlier ones."""
        self.selection = Selection(
            self.contested, self._keep_verdict, self.ranks, tidy=self._tidy, is_watched=self.gpu is None
        )
        self.warm_start = WarmStart(
            name=self.name,
            config=self.config,
            profile=self.profile,
            is_for_others=self.ranks.is_alone and self.gpu is None,
        )

    @property
    def name(self) -> str:
        """Name of the Dynamo graph, with which those of its graphs begin."""
        return f"graph{self.number}"

    def _name_of(self, role: Role) -> str:
        return f"{self.name}_{role}"

    @property
    def verdict(self) -> Verdict | None:
        """What a contest said, an earlier run's if none was held in this one."""
        findings = [item.finding for item in (*(graph.compilation for graph in self.graphs), *self.left)]
        remembered = (finding.verdict for finding in findings if finding is not None and finding.verdict is not None)
        return self.selection.verdict or next(remembered, None)

    @property
    def verdicts(self) -> list[tuple[str, Verdict]]:
        """What all contests said, with the name of what they were about."""
        found = [] if self.verdict is None else [(self.name, self.verdict)]
        for graph in self.graphs:
            if graph.selection is not None and graph.selection is not self.selection and graph.selection.verdict:
                found.append((graph.compilation.capture.name, graph.selection.verdict))
        return found

    def current_graphs(self) -> list[CompiledGraph]:
        """Return the graphs, of those with dynamic shapes only what ran last."""
        others = {id(graph) for family in self.families for graph in family.buckets.values()}
        return [graph for graph in self.graphs if id(graph) not in others] + [each.latest for each in self.families]

    def state(self) -> State:
        """Return whether anything about its graphs is still being decided, and where in that it is."""
        if self.falls_back:
            return State(graph=self.name, stage=Stage.FALLS_BACK, detail=self.handed_over[0][1])
        running = [graph for graph in self.current_graphs() if graph.has_run]
        if not running and not self.handed_over:
            return State(graph=self.name, stage=Stage.MEASURING, detail="not called yet")
        waits = [graph.progress for graph in running]
        waits += [g.selection.progress for g in running if g.selection is not None and not g.selection.is_settled]
        wait = next((wait for wait in waits if wait is not None), None)
        if wait is not None:
            return State(graph=self.name, stage=Stage.MEASURING, detail=wait)
        rest = ", ".join(name for name, _ in self.handed_over)
        return State(graph=self.name, stage=Stage.SETTLED, detail=f"Inductor runs {rest}" if rest else "")

    def _keep_verdict(self, verdict: Verdict) -> None:
        _logger.info("%s: chosen by measuring: %s", self.name, verdict)
        is_worth_keeping = verdict.standings[0].num_rounds >= MIN_ROUNDS
        is_inductor_known = verdict.has_met(Variant.INDUCTOR) or not self.selection.is_watched
        for graph in self.contested:
            if graph.has_run and is_worth_keeping:
                self.warm_start.keep(graph.compilation, graph.way, verdict)
            if is_inductor_known and all(other.has_run for other in self.contested):
                graph.compile_whole = None  # it holds a graph; later contests are held among what is compiled now
            if self.gpu is not None:  # what lost holds much memory, and no drift is looked for there
                graph.keep_only_this_way()
        for way in self.memories.keys() - {graph.way for graph in self.contested} - {Variant.PLAN}:
            del self.memories[way]
        if self.config.runtime.keep_memory:
            trim_memory()  # each way left its own behind

    def _tidy(self) -> None:
        """Give back free memory, unless that falls into timed steps of another model; lanes of a GPU free nothing."""
        others = (model.selection.is_contending for model in compiled_models() if model is not self)
        if self.config.runtime.keep_memory and self.gpu is None and not any(others):
            trim_memory()

    def compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Compile the Dynamo graph in segments, or as torch.compile does with these settings of Inductor."""
        reason = _reason_not_to_trace(example_inputs, self.device)
        if reason is not None:
            self._fall_back(reason, level=logging.INFO)
            return self._compile_plainly(graph_module, example_inputs, settings)
        try:
            with with_settings(settings), copy_of_dynamo_graph(graph_module) as copied:
                compiled = compile_with_inductor(
                    copied,
                    example_inputs,
                    self.compile_graph,
                    recompute_masks=self.config.runtime.recompute_masks,
                    eager_randomness=self.config.runtime.bodies == "eager",
                    cache=self._cache(graph_module, example_inputs),
                    settings=settings,
                )
        except Exception as error:  # if torch.compile alone raises it too, then from there
            if self.config.debug.strict or isinstance(error, RankError) or is_for_dynamo(error):
                raise
            self._forget_graphs()
            self._fall_back(f"{type(error).__name__}: {error}", level=logging.WARNING)
        return self._compile_plainly(graph_module, example_inputs, settings) if self.falls_back else compiled

    def _compile_plainly(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Compile the Dynamo graph as torch.compile does, or, without a C++ compiler, run it operator by operator."""
        with copy_of_dynamo_graph(graph_module) as kept, Progress(f"compiling {self.name}") as progress:
            progress.at("as torch.compile does,")
            try:
                return compile_plainly(graph_module, example_inputs, settings)
            except Exception as error:
                self._note_no_compiler(error)
                with with_settings(settings):
                    return compile_with_inductor(
                        kept,
                        example_inputs,
                        lambda graph, *_, **__: (interpret_whole(graph), None),
                        recompute_masks=False,
                        settings=settings,
                    )

    def _fall_back(self, reason: str, *, level: int) -> None:
        self.falls_back = True
        self._log_fallback(self.name, reason, level=level)

    def _cache(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Cache | None:
        """Return how AOTAutograd's cache gives the graphs of a Dynamo graph back; None where it is not to have them."""
        key = self.warm_start.bundle_key(graph_module, example_inputs)
        return None if key is None else Cache(key=key, unbundle=self.unbundle)

    def unbundle(self, bundle: SegmentsBundle | WholeBundle | FallbackBundle) -> Run:
        """Make a graph of what an earlier process compiled.

        Raises:
            Exception: whatever stands against it; all graphs are compiled anew then.
        """
        if self.falls_back:  # this is the backward of a forward that does
            return _replaced
        try:
            match bundle:
                case FallbackBundle():
                    return self._unbundle_fallback(bundle)
                case WholeBundle():
                    return self._unbundle_whole(bundle)
                case SegmentsBundle():
                    return self._unbundle_segments(bundle)
        except Exception as error:  # AOTAutograd takes it for a graph that it has not
            self.warm_start.outdate(error)
            _logger.info("%s is compiled anew: %s: %s", self.name, type(error).__name__, error)
            raise

    def _unbundle_fallback(self, bundle: FallbackBundle) -> Run:
        self._take_left(bundle)
        self._fall_back(bundle.reason, level=logging.INFO)
        return _replaced

    def _unbundle_whole(self, bundle: WholeBundle) -> Run:
        self._take_left(bundle)
        compiled = unbundle_code(bundle.code)
        self._log_fallback(self._name_of(bundle.role), bundle.reason, level=logging.INFO)
        return compiled

    def _take_left(self, bundle: WholeBundle | FallbackBundle) -> None:
        if bundle.left is None:
            return
        finding = self.warm_start.recall_under(self._name_of(bundle.role), bundle.history_key)
        if bundle.left.finding is not None and (finding is None or finding.way != Variant.INDUCTOR):
            raise UnsupportedGraphError("that Inductor is faster is known no longer")
        self.left.append(rename(bundle.left, self._name_of(bundle.role)))

    def _unbundle_segments(self, bundle: SegmentsBundle) -> Run:
        begin = time.perf_counter_ns()
        name = self._name_of(bundle.compilation.capture.role)
        known = rename(bundle.compilation, name)
        compilation = replace(known, finding=None)
        finding = self.warm_start.recall_under(name, bundle.history_key)
        if finding is not None:
            runner = StageRunner()
            found = compile_finding(known.capture, known.partition, finding, profile=known.profile, runner=runner)
            compilation = found or compilation
        original, kwargs = bundle.original, bundle.kwargs
        compile_whole = None if original is None else partial(_compile_bundled, original, current_settings(), kwargs)
        reason = reason_to_leave(compilation, self.config)
        if reason is not None:
            self.left.append(compilation)
            if self._is_for_both(compilation.capture.role, compilation):
                self._fall_back(reason, level=logging.INFO)
                return _replaced
            if compile_whole is None:
                raise UnsupportedGraphError("there is no graph that Inductor could compile")
            compiled = compile_whole()
            self._log_fallback(name, reason, level=logging.INFO)
            return compiled
        if self.config.runtime.keep_memory:
            keep_memory()
        planned = time.perf_counter_ns()
        bodies = tuple(map(unbundle_body, bundle.bodies))
        _tell_of_python(compilation, bodies)
        graph = CompiledGraph(
            compilation=compilation,
            bodies=bodies,
            config=self.config,
            mutates=bundle.mutates,
            compile_whole=compile_whole,
            selection=None if compile_whole is None else self.selection,
            contract=bundle.contract,
            commons=Commons(self.ranks),
        )
        self._add(graph)
        _log_summary(compilation, planned - begin, time.perf_counter_ns() - planned, did="loaded")
        return graph

    def _add(self, graph: CompiledGraph) -> None:
        self.graphs.append(graph)
        if graph.selection is not None:
            self.contested.append(graph)

    def compile_graph(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[Run, Bundle | None]:
        """Compile one graph after AOTAutograd; `kwargs` are those of Inductor's inner compiler."""
        role = role_of(kwargs)
        name = self._name_of(role)
        if role is not Role.BACKWARD:  # what came from AOTAutograd's cache was not enough
            self._forget_graphs()
        elif self.falls_back:  # with its forward
            return _replaced, partial(self._bundle_fallback, role, "", None)
        outdated = self.warm_start.outdated
        if self.config.debug.strict and outdated is not None and not isinstance(outdated, UnsupportedGraphError):
            raise outdated
        aside = None
        try:
            aside = set_aside(graph_module, example_inputs, kwargs)
            piece, inputs, own, boundary = (graph_module, example_inputs, kwargs, None) if aside is None else aside
            adopt_layouts(piece, inputs)
            compiled, bundle = self._compile_in_segments(piece, boundary, name=name, role=role, **own)
        except RankError:  # Inductor's code would be another than what the other ranks run
            raise
        except Exception as error:  # whatever it is, Inductor still can: training must not stop because of us
            is_refusal = isinstance(error, UnsupportedGraphError | NothingToGainError)
            if self.config.debug.strict and not is_refusal:
                raise
            reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            left = self.left[-1] if isinstance(error, NothingToGainError) else None
            level = logging.INFO if is_refusal else logging.WARNING  # what is no refusal is a defect of ours
            is_kept = is_refusal and aside is None and outdated is None
            if self._is_for_both(role, left):
                self._fall_back(reason, level=level)
                report_output_strides(graph_module)
                return _replaced, partial(self._bundle_fallback, role, reason, left) if is_kept else None
            self._log_fallback(name, reason, level=level)
            try:
                run = self._compile_whole(name, graph_module, example_inputs, **kwargs)
            except Exception as failure:
                if role is not Role.BACKWARD or not self.warm_start.has_bundles:
                    raise
                return _fails(failure), None  # it compiles with the forward, and may never be called
            return run, partial(self._bundle_whole, role, reason, left, run) if is_kept else None
        report_output_strides(graph_module)
        return compiled, bundle if outdated is None else None

    def _forget_graphs(self) -> None:
        self.falls_back = False
        for known in (self.graphs, self.contested, self.families, self.left, self.handed_over):
            known.clear()

    def _is_for_both(self, role: Role, left: Compilation | None) -> bool:
        """Whether the Dynamo graph falls back where this graph does: with a forward, unless the two were mixed."""
        finding = None if left is None else left.finding
        verdict = None if finding is None else finding.verdict
        return role is not Role.BACKWARD and (verdict is None or set(verdict.choice) == {Variant.INDUCTOR})

    def _log_fallback(self, name: str, reason: str, *, level: int) -> None:
        self.handed_over.append((name, reason))
        whose = "torch.compile" if self.falls_back else "Inductor"
        _logger.log(level, "%s falls back to %s: %s", name, whose, reason)

    def _bundle_fallback(self, role: Role, reason: str, left: Compilation | None) -> FallbackBundle:
        key = self.warm_start.key_of(self._name_of(role))
        return FallbackBundle(role=role, reason=reason, left=left, history_key=key)

    def _bundle_whole(self, role: Role, reason: str, left: Compilation | None, run: Run) -> WholeBundle:
        key = self.warm_start.key_of(self._name_of(role))
        return WholeBundle(role=role, reason=reason, left=left, history_key=key, code=bundle_code(run))

    def _bundle_segments(
        self, graph: CompiledGraph, original: fx.GraphModule | None, kwargs: Mapping[str, Any]
    ) -> SegmentsBundle:
        return SegmentsBundle(
            compilation=graph.compilation,
            history_key=self.warm_start.key_of(graph.compilation.capture.name),
            bodies=tuple(map(bundle_body, graph.bodies)),
            mutates=graph.mutates,
            contract=graph.contract,
            original=None if original is None else bundle_graph(original),
            kwargs=shared_kwargs(kwargs),
        )

    def _compile_in_segments(
        self, graph_module: fx.GraphModule, boundary: Boundary | None, *, name: str, role: Role, **kwargs: Any
    ) -> tuple[Run, Bundle | None]:
        begin = time.perf_counter_ns()
        config, commons = self.config, Commons(self.ranks)
        sizes, base = {} if boundary is None else boundary.sizes, name
        if not self.ranks.can_agree:
            raise UnsupportedGraphError("several ranks cannot agree on its plan: their process group has no store")
        if sizes:
            if config.plan.memory_quota is not None:
                raise UnsupportedGraphError(
                    "a memory quota is kept by plans for known sizes only, and its shapes are dynamic; compile with "
                    "dynamic=False to get lanes"
                )
            if not self.ranks.is_alone:
                raise UnsupportedGraphError(
                    "several ranks do not agree on plans for dynamic shapes; compile with dynamic=False to get lanes"
                )
            name = _with_sizes(name, sizes)
        compilation = plan_graph(
            graph_module,
            name=name,
            role=role,
            profile=self.profile,
            config=config,
            device=self.device,
            commons=commons,
            recall=self.warm_start.recall,
        )
        planned = time.perf_counter_ns()
        reason = reason_to_leave(compilation, config)
        if reason is not None:
            self.left.append(compilation)
            if compilation.finding is None:
                self.warm_start.keep(compilation, Variant.INDUCTOR, None)
            raise NothingToGainError(reason)
        if config.runtime.keep_memory:
            keep_memory()
        is_contested = _is_contested(compilation.plan, config)
        original = clone_graph(graph_module) if is_contested else None
        compile_whole = None if original is None else partial(compile_again, original, current_settings(), **kwargs)
        has_plans_by_size = bool(sizes) and has_free_plans(compilation.plan, config)
        contract = Contract(
            static_inputs=frozenset(kwargs.get("static_input_idxs") or ()),
            written_inputs=written_inputs(graph_module),
            user_outputs=user_outputs(graph_module),
            unsafe=find_uncapturable(graph_module),
        )
        if self.gpu is None:  # where threads may not be pinned, nothing is compiled in vain
            start_lanes(compilation.plan.lanes, park_team=config.runtime.park_team)
        try:
            with Progress(f"compiling {name}") as progress:
                bodies = _compile_bodies(
                    graph_module, compilation, config, self.device, commons, at=progress.at, **kwargs
                )
        except Exception as error:
            self._accept_no_compiler(error)
            config = replace(config, runtime=replace(config.runtime, bodies="eager"))
            is_contested = False
            bodies = _compile_bodies(graph_module, compilation, config, self.device, commons)
        graph = CompiledGraph(
            compilation=compilation,
            bodies=bodies,
            config=config,
            mutates=writes_inputs(graph_module),
            compile_whole=compile_whole if is_contested else None,
            selection=self.selection if is_contested and not sizes else None,
            gpu=self.gpu,
            tuned=_tune_bodies(graph_module, compilation, self.gpu, config, **kwargs),
            contract=contract,
            memories=self.memories,
            commons=commons,
        )
        _log_summary(compilation, planned - begin, time.perf_counter_ns() - planned)
        if graph.is_deterministic:
            _logger.info("%s: the plan stays as predicted: deterministic algorithms are on, so no time decides", name)
        if boundary is not None and has_plans_by_size:
            family = self._make_family(graph, graph_module, boundary, base)
            self.graphs.append(graph)
            self.families.append(family)
            return family, None
        graph.boundary = boundary
        self._add(graph)
        return graph, partial(self._bundle_segments, graph, original, kwargs) if boundary is None else None

    def _make_family(
        self, first: CompiledGraph, graph_module: fx.GraphModule, boundary: Boundary, name: str
    ) -> GraphFamily[CompiledGraph]:
        """Return a graph with dynamic shapes; `first` is what it is for the sizes that it was traced with."""
        config, profile = self.config, self.profile
        first.submit = in_background
        compile_whole = None if first.compile_whole is None else _once(first.compile_whole)
        capture = first.compilation.capture
        formulas = read_formulas(graph_module, capture)

        def hold_contest(graph: CompiledGraph) -> None:
            graph.compile_whole = compile_whole
            if compile_whole is not None:
                label = graph.compilation.capture.name
                tell = partial(_logger.info, "%s: chosen by measuring: %s", label)
                graph.selection = Selection([graph], tell, is_watched=False)

        def make(sizes: Mapping[str, int]) -> CompiledGraph:
            begin = time.perf_counter_ns()
            resized = resize_capture(capture, formulas, sizes, name=_with_sizes(name, sizes))
            runner = StageRunner()
            compilation = compile_sizes(first.compilation, resized, profile=profile, config=config, runner=runner)
            graph = first.planned_as(compilation)
            hold_contest(graph)
            self.graphs.append(graph)
            _log_summary(compilation, time.perf_counter_ns() - begin, 0)
            return graph

        hold_contest(first)
        return GraphFamily(
            name=name,
            boundary=boundary,
            symbols=formulas.symbols,
            sizes=boundary.sizes,
            first=first,
            make=make,
            drop=self.graphs.remove,
            is_strict=config.debug.strict,
        )

    def _compile_whole(
        self, name: str, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """Let Inductor compile the graph whole, or, without a C++ compiler, run it operator by operator."""
        original = clone_graph(graph_module)
        try:
            compiled: Run = compile_whole(graph_module, example_inputs, **kwargs)
            return compiled
        except Exception as error:
            self._note_no_compiler(error)
            return interpret_whole(original)

    def _note_no_compiler(self, error: Exception) -> None:
        complaint = self._accept_no_compiler(error)
        name, reason = self.handed_over.pop()
        self.handed_over.append((name, f"{reason}; operator by operator, since {complaint}"))

    def _accept_no_compiler(self, error: Exception) -> str:
        """Say that the C++ compiler does not work, and return what is wrong, if `error` tells; raise it if not."""
        complaint = compiler_complaint(error)
        if complaint is None or self.config.debug.strict or self.device != _CPU:
            raise error
        _warn_of_compiler(complaint)
        return complaint


def plan_graph(
    graph_module: fx.GraphModule,
    *,
    name: str,
    role: Role,
    profile: DeviceProfile,
    config: Config,
    device: torch.device = _CPU,
    commons: Commons | None = None,
    recall: Callable[[Capture, Partition], Finding | None] = lambda capture, partition: None,
) -> Compilation:
    """Take a graph after AOTAutograd through all stages up to the program, and dump it if `debug.dump` says so.

    With `commons`, the plan is the one that all ranks run; with `recall`, one that an earlier process found.

    Raises:
        UnsupportedGraphError: the graph has something that segments cannot express, or its plan cannot be settled.
        RankError: the plan that was settled is not known, or not legal here.
    """
    dump = config.debug.dump / name if config.debug.dump is not None else None
    runner = StageRunner(dump)
    capture = runner.run(
        "capture",
        capture_graph,
        graph_module,
        name=name,
        role=role,
        device=device,
        check=check.check_capture,
        text=text.format_capture,
    )
    compilation = compile_capture(
        capture,
        profile=profile,
        config=config,
        runner=runner,
        recall=partial(recall, capture),
        is_alone=commons is None or commons.ranks.is_alone,
    )
    if commons is not None:
        commons.enroll(compilation)
        settled = commons.settle(compilation, compilation, runner)
        if settled is None:
            raise UnsupportedGraphError(
                f"its plan of {format_count(len(compilation.plan.assignments), 'segment')} is too large for the store "
                "in which ranks agree on it; cut it into fewer by 'partition.granularity'"
            )
        compilation = settled
    if dump is not None:
        with warn_of_files("the plan is not dumped"):
            save_plan(compilation.plan, compilation.partition.graph, dump / FILE_NAME)
    trace_artifact(f"apollo_{name}", lambda: text.format_plan(compilation.plan, compilation.partition.graph))
    return compilation


def reason_to_leave(compilation: Compilation, config: Config) -> str | None:
    """Return why a graph is better left to Inductor from the start; None where its plan is worth compiling."""
    if compilation.finding is not None and compilation.finding.verdict is not None:
        is_left = compilation.finding.way == Variant.INDUCTOR
        return f"Inductor ran it when the contest was over: {compilation.finding.verdict}" if is_left else None
    if _may_gain(compilation, config) or not _is_contested(compilation.plan, config):
        return None
    return _nothing_to_gain(compilation.plan)


def _may_gain(compilation: Compilation, config: Config) -> bool:
    """Return whether segments could be faster than the graph as Inductor compiles it.

    With lanes, or without: native segments in turn are other code than the whole graph, whose kernels reach across them
    and are called from Python. No formula says which is faster; on chains of layers it was segments by up to 13 %, or
    Inductor by 3 %. One segment differs by Python between kernels alone. On a GPU what competes are CUDA graphs, which
    plain Inductor is not, and formulas are far off until bodies were timed: a product that just fits the whole device
    takes twice as long on a lane that is a little smaller.
    """
    if compilation.profile.kind == "cuda":
        return True
    if uses_lanes(compilation.plan) or _wrapper_share(compilation) >= WORTH_NATIVE:
        return True
    return config.runtime.bodies == "native" and len(compilation.partition.graph.segments) > 1


_models: weakref.WeakValueDictionary[int, CompiledModel] = weakref.WeakValueDictionary()
"""Compiled models by age; each lives as long as Dynamo keeps the function that was compiled for it."""

_ages = itertools.count()


def compiled_models() -> list[CompiledModel]:
    """Return what this process has compiled and still keeps, oldest first."""
    return [model for _, model in sorted(_models.items())]


def report(
    model: torch.nn.Module | None = None, *, units: Sequence[int] | None = None, profiles: Sequence[str] = PROFILES
) -> Report:
    """Return what was done to a compiled model and what its last step measured; print it to read it.

    Arguments:
        model: the module, compiled or as it was before; its graphs are found by the parameters and buffers that they
            read. None is all that this process compiled and still keeps: graphs of functions, and of what FSDP2
            gathers, read no parameter of a module.
        units: numbers of units to compare with; None is half, twice and four times as many as there are.
        profiles: device profiles to compare with, paths or packaged names. Every comparison plans all graphs again.

    Other batch sizes take inputs, which no compiled model keeps: see `apollo_compile.tools.explain.compare_batches`.

    Raises:
        TargetError: `model` is no module.
        ConfigError: a profile cannot be read, or there are to be no units.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TargetError(
            f"there is no report of a {type(model).__name__}: expected a torch.nn.Module, whose graphs are found by "
            "the parameters that they read; report() without arguments tells of all that was compiled"
        )
    found = compiled_models() if model is None else find_models(model)
    return merge_reports(
        Report(
            graphs=tuple(_summarize(entry, units, profiles)),
            handed_over=tuple(entry.handed_over),
            verdicts=tuple(entry.verdicts),
            breaks=() if entry.ended_by is None else (entry.ended_by,),
            states=(entry.state(),),
        )
        for entry in found
    )


def _summarize(model: CompiledModel, units: Sequence[int] | None, profiles: Sequence[str]) -> list[GraphSummary]:
    """Return the numbers of a model's graphs, those that Inductor runs included: forward before backward."""
    compare = functools.partial(what_if, config=model.config, units=units, profiles=profiles)
    graphs = [
        summarize(
            graph.compilation,
            NOT_RUN if graph.is_cold else graph.trace(),
            num_replans=graph.num_replans,
            is_cold=graph.is_cold and graph.way_of_plan == Variant.PLAN,
            is_deterministic=graph.is_deterministic,
            way=graph.way_of_plan,
            what_if=() if graph.is_variant else compare(graph.compilation),
            lane_bytes=graph.lane_bytes(),
            lane_memory_quota=model.config.device.lane_memory_quota,
        )
        for graph in model.graphs
    ]
    graphs += [
        summarize(
            left,
            NOT_RUN,
            way=Variant.INDUCTOR,
            what_if=compare(left),
            lane_memory_quota=model.config.device.lane_memory_quota,
        )
        for left in model.left
    ]
    return sorted(graphs, key=lambda graph: graph.role is Role.BACKWARD)


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
                is_in_turn = graph.way == Variant.PLAN and not uses_lanes(graph.compilation.plan)
                ways.append(Variant.SERIAL if is_in_turn else graph.way)
        ways += [Variant.INDUCTOR] * len(model.handed_over)
    return list(dict.fromkeys(ways))


def find_models(module: torch.nn.Module) -> list[CompiledModel]:
    """Return what was compiled for `module`: the graphs that read its parameters or buffers."""
    own = storages_of(itertools.chain(module.parameters(), module.buffers()))
    return [model for model in compiled_models() if model.storages & own]


def _is_contested(plan: Plan, config: Config) -> bool:
    """Whether measured times may overrule the plan: not if somebody wants this plan, its limit, or the same numbers."""
    return may_be_contested(config) and not plan.pinned


def _compile_bundled(original: bytes, settings: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Run:
    """Compile a graph of a bundle as Inductor alone would."""
    return compile_again(unbundle_graph(original), settings, **kwargs)


def _replaced(inputs: list[Any]) -> Sequence[Any]:
    """Stand for a graph of a Dynamo graph that falls back, until that is compiled by torch.compile alone."""
    raise AssertionError("a graph that falls back runs what torch.compile makes of it")


_replaced._boxed_call = True  # type: ignore[attr-defined]


def _fails(error: Exception) -> Run:
    """Return a graph that cannot run; what its error was raised from is not kept."""
    traceback.clear_frames(error.__traceback__)

    def fail(inputs: list[Any]) -> Sequence[Any]:
        raise error

    return fail


def _once(work: Callable[[], Run]) -> Callable[[], Run]:
    """Return a function that does `work` in its first call, and gives its result or its error in every one."""
    lock, left = threading.Lock(), [work]
    done: list[Future[Run]] = []

    def give() -> Run:
        with lock:
            if not done:  # in an interrupt, it is done again
                done.append(at_once(left[0]))
                left.clear()  # it holds a graph
            return done[0].result()

    return give


def _with_sizes(name: str, sizes: Mapping[str, int]) -> str:
    return f"{name}[{', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}]"


def _wrapper_share(compilation: Compilation) -> float:
    """Return how much Python between kernels would add to the segments in turn, as a share of their time."""
    kernels = sum(kernel.count for segment in compilation.partition.graph.segments for kernel in segment.work.parts)
    return kernels * WRAPPER_NS_PER_KERNEL / max(1, compilation.plan.serial_ns)


def _nothing_to_gain(plan: Plan) -> str:
    possible = plan.serial_ns / plan.lower_bound_ns if plan.lower_bound_ns else 1.0
    return (
        f"nothing to gain: of its {format_count(len(plan.assignments), 'segment')}, predicted to take "
        f"{format_ns(plan.serial_ns)} in turn, no plan was found that is faster by 'plan.min_gain', and none can be "
        f"more than {possible:.2f}x as fast"
    )


def _compile_bodies(
    graph_module: fx.GraphModule,
    compilation: Compilation,
    config: Config,
    device: torch.device,
    commons: Commons,
    at: Callable[[str, int, int], None] = lambda phase, number, count: None,
    **kwargs: Any,
) -> tuple[CompiledBody, ...]:
    pieces = [(body.name, *extract_body(graph_module, body)) for body in compilation.partition.bodies]
    if config.runtime.bodies == "eager":
        return interpret_bodies(pieces)
    if config.runtime.onednn and device.type == "cpu" and may_choose_library():
        at("which library multiplies", 0, 0)
        _choose_libraries([piece.graph for _, piece, _ in pieces], compilation, config, commons)
    is_native = config.runtime.bodies == "native" and device.type == "cpu"
    bodies = compile_bodies(pieces, native=is_native, at=at, **kwargs)
    _tell_of_python(compilation, bodies)
    return bodies


_losses = itertools.count()
"""How often it was told that bodies keep Python though they need not."""


def _tell_of_python(compilation: Compilation, bodies: Sequence[CompiledBody]) -> None:
    """Say why bodies keep Python: where they need not, in one warning of the process, for the reason is mostly one."""
    kept = [
        (body.name, made.keeps_python)
        for body, made in zip(compilation.partition.bodies, bodies, strict=True)
        if made.keeps_python is not None
    ]
    callers = [name for name, why in kept if not why.is_lost]
    if callers:
        _logger.info(
            "%s: segments that call Python run under the GIL: %s", compilation.capture.name, ", ".join(callers)
        )
    lost = [(name, why.reason) for name, why in kept if why.is_lost]
    if lost:
        _logger.log(
            logging.INFO if next(_losses) else logging.WARNING,
            "%s: %d of %s could not be compiled to run without Python, so lanes take turns under the GIL and gain "
            "little or nothing: Inductor's C++ wrapper failed for segment %s: %s; 'apollo doctor' tells whether any "
            "body can be native here (told once; others of this process in INFO lines)",
            compilation.capture.name,
            len(lost),
            format_count(len(bodies), "body", "bodies"),
            *lost[0],
        )


def _choose_libraries(graphs: Sequence[fx.Graph], compilation: Compilation, config: Config, commons: Commons) -> None:
    """Give matrix products of the graphs of bodies to oneDNN where it is faster on the cores that they run on."""
    with_cores = list(zip(graphs, _cores_of_bodies(compilation), strict=True))
    libraries = libraries_in(config.device.cache if config.plan.remember else None)
    with real_tensors():
        faster = libraries.choose((matmul, cores) for graph, cores in with_cores for matmul in find_matmuls(graph))
    names = commons.settle_names("products for oneDNN", (f"{matmul.name} on {cores}" for matmul, cores in faster))

    def is_for_onednn(matmul: Matmul, *, cores: int) -> bool:
        return f"{matmul.name} on {cores}" in names

    count = sum(give_to_onednn(graph, partial(is_for_onednn, cores=cores)) for graph, cores in with_cores)
    if count:
        name, what = compilation.capture.name, format_count(count, "matrix product")
        _logger.info("%s: oneDNN computes %s of its bodies", name, what)


def _cores_of_bodies(compilation: Compilation) -> list[int]:
    """Return on how many cores most segments of each body are planned to run."""
    counts = [Counter[int]() for _ in compilation.partition.bodies]
    segments = compilation.partition.graph.segments
    for assignment in compilation.plan.assignments:
        counts[segments[assignment.segment].body][assignment.quota.units] += 1
    return [count.most_common(1)[0][0] for count in counts]


def _tune_bodies(
    graph_module: fx.GraphModule, compilation: Compilation, gpu: Gpu | None, config: Config, **kwargs: Any
) -> dict[tuple[BodyId, int], CompiledBody]:
    """Return code of all bodies for the lanes of a GPU with fewer units than it has, one of every size."""
    if gpu is None or config.runtime.bodies == "eager" or not depends_on_units():
        return {}
    found = {}
    whole, *lanes = compilation.plan.lanes
    for units, lane in {len(lane.units): lane for lane in lanes}.items():
        pieces = [(body.name, *extract_body(graph_module, body)) for body in compilation.partition.bodies]
        with gpu.on_lane(lane):  # where kernels are timed that Inductor chooses among
            left_out = len(whole.units) - units
            bodies = compile_bodies(pieces, native=False, units=units, left_out=left_out, **kwargs)
        found.update({(BodyId(number), units): body for number, body in enumerate(bodies)})
    return found


def role_of(kwargs: Mapping[str, Any]) -> Role:
    """Return the role of a graph from what AOTAutograd passes with it."""
    if kwargs.get("is_backward"):
        return Role.BACKWARD
    return Role.INFERENCE if kwargs.get("is_inference") else Role.FORWARD


def _reason_not_to_trace(example_inputs: Sequence[Any], device: torch.device) -> str | None:
    """Return why a Dynamo graph falls back whatever it computes; None where its operators have to be looked at."""
    elsewhere = {item.device for item in example_inputs if isinstance(item, torch.Tensor)} - {device, _CPU}
    if not elsewhere:
        return None
    where = ", ".join(sorted(map(str, elsewhere)))
    if device != _CPU:
        return f"it has tensors on {where}, and all lanes of this graph are on {device}"
    advice = ", unless option 'device.cuda_lanes' is on" if any(item.type == "cuda" for item in elsewhere) else ""
    return f"it has tensors on {where}, and lanes run on the CPU only{advice}"


def select_profile(config: Config) -> DeviceProfile:
    """Return the profile that graphs are planned for.

    Raises:
        ConfigError: the profile or the number of units that was asked for cannot be used here.
    """
    units = available_units() if config.device.units is None else config.device.units
    if units > (most := most_units()):
        raise ConfigError(f"option 'device.units' is {units}; lanes may use {most} cores here: choose 1 to {most}")
    if config.device.profile is not None:
        profile = load_profile(config.device.profile)
        if profile.kind != "cpu":
            raise ConfigError(
                f"device profile {config.device.profile} is for a {profile.kind} device; only graphs on a CPU are "
                "planned: name the profile of a CPU"
            )
        if str(config.device.profile) in packaged_profiles():
            profile = limit_units(profile, units)  # it is for any number of cores
        elif profile.units > units and (profile.units <= most or config.device.units or core_share().size > 1):
            profile = limit_units(profile, units)  # it was measured for more than this process is to use, or ever had
        if profile.units > most:
            raise ConfigError(
                f"device profile {config.device.profile} is for {profile.units} cores; lanes may use {most} cores "
                "here: measure one here, or raise torch.set_num_threads"
            )
        return profile
    return discover_profile(units, cache_dir=config.device.cache)


@functools.cache
def _log_share() -> None:
    """Say once which cores are this rank's, if others are on the machine."""
    share, units = core_share(), available_units()
    if share.size == 1:
        return
    own = ",".join(map(str, share.own))
    if units < len(share.own):
        own += f", of which torch has threads for {units} only (OMP_NUM_THREADS is 1 by default under torchrun)"
    _logger.info("local rank %d of %d: its lanes use cores %s", share.rank, share.size, own)


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _warn_without_lanes() -> None:
    """Say where a launcher has given every rank several cores, and torch one thread for them."""
    share = core_share()
    if share.size > 1 and share.rank == 0 and len(share.own) > 1 and torch.get_num_threads() == 1:
        _warn_of_one_thread(share.size, len(share.own))


@functools.cache
def _warn_of_one_thread(num_ranks: int, num_cores: int) -> None:
    """Say it once, however many graphs there are."""
    _logger.warning(
        "there are no lanes on %d local ranks, so nothing overlaps: each has %d cores, and torch has 1 thread "
        "(torchrun sets OMP_NUM_THREADS=1); start torchrun with OMP_NUM_THREADS=%d, or call "
        "torch.set_num_threads(%d) before the model is compiled",
        num_ranks,
        num_cores,
        num_cores,
        num_cores,
    )


def _open_gpu(example_inputs: Sequence[Any], config: Config) -> TorchGpu | None:
    """Return the GPU that the graph is on, if it is to run on lanes of it and can."""
    tensors = (item for item in example_inputs if isinstance(item, torch.Tensor))
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None or not config.device.cuda_lanes:
        return None
    try:
        return TorchGpu(device.index)
    except CudaError as error:
        if config.debug.strict:
            raise
        _logger.warning("no lanes on %s: %s", device, error)
        return None


def _gpu_profile(gpu: TorchGpu, config: Config) -> DeviceProfile:
    """Return the profile for the SMs and atoms that this GPU has."""
    native = gpu.native
    if config.device.profile is None:
        fingerprint = gpu_fingerprint(native.name, cuda=native.driver_version, units=native.num_sms)
        profile = discover_gpu_profile(fingerprint, cache_dir=config.device.cache)
    else:
        profile = load_profile(config.device.profile)
    if profile.kind != "cuda":
        raise ConfigError(
            f"device profile {config.device.profile} is for a {profile.kind} device; this graph is on {gpu.device}: "
            "name the profile of a GPU, or none"
        )
    return replace(profile, units=native.num_sms, atoms=tuple(native.atom_sizes))


@functools.cache
def _warn_of_compiler(complaint: str) -> None:
    """Say once that nothing can be compiled, however many graphs there are."""
    _logger.warning(
        "graphs run operator by operator, since no C++ code can be compiled: %s; 'apollo doctor' looks into it",
        complaint,
    )


def _log_summary(compilation: Compilation, planning_ns: int, compiling_ns: int, *, did: str = "compiled") -> None:
    plan = compilation.plan
    lanes = {assignment.lane for assignment in plan.assignments}
    _logger.info(
        "%s: %s %d segments (%d bodies) onto %d lanes: predicted %s, serial %s, bound %s; planning took %s, rest %s",
        compilation.capture.name,
        did,
        len(plan.assignments),
        len(compilation.partition.bodies),
        len(lanes),
        format_ns(plan.makespan_ns),
        format_ns(plan.serial_ns),
        format_ns(plan.lower_bound_ns),
        format_ns(planning_ns),
        format_ns(compiling_ns),
    )


def _set_log_level(level: str) -> None:
    logger = logging.getLogger("apollo_compile")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():  # a level without a place to write to would show nothing
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
