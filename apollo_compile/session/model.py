"""All graphs that come from one Dynamo graph: their variants, fallbacks with reasons, and the state of autotuning."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

from apollo_compile.config import Config
from apollo_compile.device.target import Code, Run, Target
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import GraphBreak, Role, Variant, Verdict
from apollo_compile.pipeline import Compilation
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.buckets import GraphFamily, at_once
from apollo_compile.session.comparison import MIN_ROUNDS
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.planning import Fallback
from apollo_compile.session.warm_start import WarmStart
from apollo_compile.torch_bridge.boundary import Boundary

if TYPE_CHECKING:
    from apollo_compile.session.contest.challenge import Challenge

_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class CompiledModel:
    """Owns the graphs of one Dynamo graph, and the autotuner that selects their variants."""

    name: str
    """Name of the Dynamo graph; the names of its graphs begin with it."""
    config: Config
    target: Target
    storages: frozenset[Hashable] = frozenset()
    """Storages of the tensors that it was compiled for; a report finds it by a module's parameters among them."""
    code: frozenset[CodeType] = frozenset()
    """Code objects that it was traced from; by them, a report finds a graph that reads no parameter."""
    graphs: list[CompiledGraph] = field(default_factory=list)
    autotuned: list[CompiledGraph] = field(default_factory=list)
    """Those of them that `autotuner` selects variants for, together."""
    families: list[GraphFamily[CompiledGraph]] = field(default_factory=list)
    """Graphs with dynamic shapes, with a plan per bucket of sizes; their graphs are also in `graphs`."""
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of every fallback: of the whole Dynamo graph, or of one of its graphs."""
    falls_back: bool = False
    """Whether the whole Dynamo graph falls back to torch.compile: Note [fallback] in `compile.py`."""
    unprofitable: list[Compilation] = field(default_factory=list)
    """Plans of fallbacks that were planned, where the plan is not worth compiling."""
    again: str = ""
    """Why Dynamo compiled the code again, as the end of a phrase; empty for a first compile."""
    called: weakref.ref[Callable[..., Any]] | None = None
    """What `torch.compile` was called with, where that is known."""
    num_before: int = 0
    """Other graphs of the same call that were compiled before."""
    has_warned: bool = False
    """Whether a warning told that its call fell into many graphs."""
    graph_break: GraphBreak | None = None
    """The graph break that ended the Dynamo graph; None where it ended with the function."""
    ranks: Ranks = field(default_factory=lambda: Ranks(None))
    """The ranks that must run the same plans and variants."""
    without_lanes: str | None = None
    """Why no lanes can take it; None if some may."""
    challenge: Challenge | None = None
    """On a GPU by default: what runs it, torch.compile's code or ours."""
    clock: Callable[[], int] = time.perf_counter_ns
    """Time of the host in nanoseconds."""
    is_for_step: bool = False
    """Whether its graphs are linked into a training step, so that their segments are needed whichever variant wins."""
    autotuner: Autotuner = field(init=False)
    warm_start: WarmStart = field(init=False)

    def __post_init__(self) -> None:
        """Create the autotuner and the warm start for the graphs to come."""
        self.autotuner = Autotuner(
            self.autotuned,
            self._keep_verdict,
            self.ranks,
            trim_memory=self.target.trim_memory,
            is_watched=self.target.is_synchronous,
            compile_share=self.config.plan.compile_share,
        )
        self.warm_start = WarmStart(
            name=self.name,
            config=self.config,
            target=self.target,
            is_for_others=self.ranks.is_alone and self.target.keeps_findings,
            is_for_step=self.is_for_step,
        )

    def name_of(self, role: Role) -> str:
        """Return the name of one of its graphs."""
        return f"{self.name} {role}"

    def load(
        self,
        compilation: Compilation,
        code: Code,
        *,
        compile_whole: Callable[[], Run] | None,
        agreement: Agreement,
        boundary: Boundary | None = None,
        submit: Callable[[Callable[[], Compilation]], Future[Compilation]] = at_once,
    ) -> CompiledGraph:
        """Return a graph that runs in segments, whether they were compiled now or by an earlier process.

        Arguments:
            compilation: its first plan.
            code: its bodies, and the contract with its caller.
            compile_whole: compiles the whole graph as Inductor alone would; None where variants are not compared.
            agreement: makes all ranks run the same plans.
            boundary: its inputs and outputs that are not tensors.
            submit: runs a replan: now, or in the background.
        """
        is_compared = compile_whole is not None and not compilation.capture.sizes  # each bucket of sizes by itself
        return CompiledGraph(
            first=compilation,
            code=code,
            config=self.config,
            target=self.target,
            compile_whole=compile_whole,
            autotuner=self.autotuner if is_compared else None,
            agreement=agreement,
            boundary=boundary,
            submit=submit,
        )

    def add(self, graph: CompiledGraph) -> None:
        """Add a graph that was compiled in segments."""
        self.graphs.append(graph)
        if graph.autotuner is not None:
            self.autotuned.append(graph)

    def add_family(self, family: GraphFamily[CompiledGraph]) -> None:
        """Add a graph with dynamic shapes."""
        self.graphs.append(family.latest)
        self.families.append(family)

    def forget_graphs(self) -> None:
        """Drop all graphs: the Dynamo graph is compiled again."""
        self.falls_back = False
        for known in (self.graphs, self.autotuned, self.families, self.unprofitable, self.fallbacks):
            known.clear()

    def fall_back(self, fallback: Fallback) -> None:
        """Let the whole Dynamo graph fall back to torch.compile, and log why."""
        self.falls_back = True
        self.add_fallback(self.name, fallback)

    def add_fallback(self, name: str, fallback: Fallback) -> None:
        """Add a fallback, and log why."""
        self.fallbacks.append((name, fallback.reason))
        if fallback.unprofitable is not None:
            self.unprofitable.append(fallback.unprofitable)
        compiler = "torch.compile" if self.falls_back else "Inductor"
        _logger.log(fallback.level, "%s falls back to %s: %s", name, compiler, fallback.reason)

    def add_to_reason(self, detail: str) -> None:
        """Append a detail to the reason of the latest fallback."""
        name, reason = self.fallbacks.pop()
        self.fallbacks.append((name, f"{reason}; {detail}"))

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of autotuning, from an earlier process if not from this one."""
        findings = [item.finding for item in (*(graph.compilation for graph in self.graphs), *self.unprofitable)]
        remembered = (finding.verdict for finding in findings if finding is not None and finding.verdict is not None)
        return self.autotuner.verdict or next(remembered, None)

    @property
    def verdicts(self) -> list[tuple[str, Verdict]]:
        """All verdicts, each with the name of its model or graph."""
        if self.challenge is not None:
            return [] if self.challenge.verdict is None else [(self.name, self.challenge.verdict)]
        found = [] if self.verdict is None else [(self.name, self.verdict)]
        for graph in self.graphs:
            if graph.autotuner is not None and graph.autotuner is not self.autotuner and graph.autotuner.verdict:
                found.append((graph.compilation.capture.name, graph.autotuner.verdict))
        return found

    def current_graphs(self) -> list[CompiledGraph]:
        """Return the graphs; of a family with dynamic shapes, only the graph that ran last."""
        others = {id(graph) for family in self.families for graph in family.buckets.values()}
        return [graph for graph in self.graphs if id(graph) not in others] + [each.latest for each in self.families]

    def running_variants(self) -> list[Variant]:
        """Return the variants of the graphs that have run; a serial plan counts as `SERIAL`."""
        if self.challenge is not None:
            return [self.challenge.variant]
        return [
            graph.variant if graph.variant != Variant.PLAN or graph.compilation.plan.uses_lanes else Variant.SERIAL
            for graph in self.current_graphs()
            if graph.has_run
        ]

    def state(self) -> State:
        """Return whether its graphs are settled, still measuring, or fall back, with the details."""
        if self.falls_back:
            return State(graph=self.name, stage=Stage.FALLS_BACK, detail=self.fallbacks[0][1])
        if self.challenge is not None:
            return self.challenge.state()
        running = [graph for graph in self.current_graphs() if graph.has_run]
        if not running and not self.fallbacks:
            return State(graph=self.name, stage=Stage.MEASURING, detail="not called yet")
        waits = [graph.progress for graph in running]
        waits += [g.autotuner.progress for g in running if g.autotuner is not None and not g.autotuner.is_settled]
        wait = next((wait for wait in waits if wait is not None), None)
        if wait is not None:
            return State(graph=self.name, stage=Stage.MEASURING, detail=wait)
        parts = [describe_result(self.verdicts, self.running_variants())] if running else []
        parts += [f"Inductor runs {name}" for name, _ in self.fallbacks]
        return State(graph=self.name, stage=Stage.SETTLED, detail="; ".join(parts))

    def _keep_verdict(self, verdict: Verdict) -> None:
        _logger.info("%s: chosen by measuring: %s", self.name, verdict)
        is_worth_keeping = verdict.standings[0].num_rounds >= MIN_ROUNDS
        is_inductor_known = verdict.has_compared(Variant.INDUCTOR) or not self.autotuner.is_watched
        for graph in self.autotuned:
            if graph.has_run and is_worth_keeping:
                self.warm_start.keep(graph.compilation, graph.variant, verdict)
            if is_inductor_known and all(other.has_run for other in self.autotuned):
                graph.compile_whole = None  # frees a graph; later comparisons take what is compiled by now
            if not self.target.is_synchronous:  # losers hold much memory, and drift is not watched there
                graph.variants.unload_others()
        self.target.keep_only({graph.variant for graph in self.autotuned} | {Variant.PLAN})
        self.target.trim_memory()  # every variant left free blocks


def describe_result(verdicts: Sequence[tuple[str, Verdict]], variants: Iterable[Variant]) -> str:
    """Return what runs in the end, and how much faster it was than Inductor, or than the next in its comparison."""
    if len(verdicts) != 1:
        return ", ".join(dict.fromkeys(variants))
    winner, *others = verdicts[0][1].standings
    if not others:
        return winner.name
    rival = next((other for other in others if other.name == Variant.INDUCTOR), others[0])
    return f"{winner.name}, {rival.ratio:.2f}x as fast as {rival.name}"
