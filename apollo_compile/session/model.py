"""All graphs that come from one Dynamo graph: what runs them, what fell back and why, and what is not decided yet."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import CodeType

from apollo_compile.config import Config
from apollo_compile.device.target import Target
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import GraphBreak, Role, Variant, Verdict
from apollo_compile.pipeline import Compilation
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.buckets import GraphFamily
from apollo_compile.session.comparison import MIN_ROUNDS
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.warm_start import WarmStart

_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class CompiledModel:
    """Keeps the graphs of one Dynamo graph, and decides with their times which variant each of them runs."""

    name: str
    """Of the Dynamo graph, with which the names of its graphs begin."""
    config: Config
    target: Target
    storages: frozenset[Hashable] = frozenset()
    """Of the tensors that it was compiled for; a module's parameters are among them, so a report finds it."""
    code: frozenset[CodeType] = frozenset()
    """That it was traced from; by it, a report finds what reads no parameter."""
    graphs: list[CompiledGraph] = field(default_factory=list)
    autotuned: list[CompiledGraph] = field(default_factory=list)
    """Those of them whose variant is decided by measuring, in common."""
    families: list[GraphFamily[CompiledGraph]] = field(default_factory=list)
    """Of those with dynamic shapes, the plans by bucket of sizes; their graphs are among `graphs` too."""
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of what Inductor runs: the Dynamo graph where that falls back, else a graph of it."""
    falls_back: bool = False
    """Whether the Dynamo graph is to be compiled as by torch.compile alone: Note [fallback] in `compile.py`."""
    unprofitable: list[Compilation] = field(default_factory=list)
    """Those of them that have a plan, but one that is not worth compiling."""
    graph_break: GraphBreak | None = None
    """What broke the Dynamo graph off; None where it ended with the function."""
    ranks: Ranks = field(default_factory=lambda: Ranks(None))
    """Who decides with this process."""
    autotuner: Autotuner = field(init=False)
    warm_start: WarmStart = field(init=False)

    def __post_init__(self) -> None:
        """Prepare what decides about the graphs to come, and what they take over from earlier processes."""
        self.autotuner = Autotuner(
            self.autotuned,
            self._keep_verdict,
            self.ranks,
            trim_memory=self.target.trim_memory,
            is_watched=self.target.is_synchronous,
        )
        self.warm_start = WarmStart(
            name=self.name,
            config=self.config,
            target=self.target,
            is_for_others=self.ranks.is_alone and self.target.keeps_findings,
        )

    def name_of(self, role: Role) -> str:
        """Return the name of one of its graphs."""
        return f"{self.name} {role}"

    def add(self, graph: CompiledGraph) -> None:
        """Take a graph that was compiled in segments."""
        self.graphs.append(graph)
        if graph.autotuner is not None:
            self.autotuned.append(graph)

    def add_family(self, family: GraphFamily[CompiledGraph]) -> None:
        """Take a graph with dynamic shapes."""
        self.graphs.append(family.latest)
        self.families.append(family)

    def forget_graphs(self) -> None:
        """Begin anew: what was compiled until now is not what will run."""
        self.falls_back = False
        for known in (self.graphs, self.autotuned, self.families, self.unprofitable, self.fallbacks):
            known.clear()

    def fall_back(self, reason: str, *, level: int) -> None:
        """Let torch.compile alone compile the Dynamo graph, and log why."""
        self.falls_back = True
        self.log_fallback(self.name, reason, level=level)

    def log_fallback(self, name: str, reason: str, *, level: int) -> None:
        """Note what does not run in segments, and log why."""
        self.fallbacks.append((name, reason))
        whose = "torch.compile" if self.falls_back else "Inductor"
        _logger.log(level, "%s falls back to %s: %s", name, whose, reason)

    def add_to_reason(self, detail: str) -> None:
        """Add to why the latest graph fell back."""
        name, reason = self.fallbacks.pop()
        self.fallbacks.append((name, f"{reason}; {detail}"))

    @property
    def verdict(self) -> Verdict | None:
        """What autotuning said, in an earlier process if not in this one."""
        findings = [item.finding for item in (*(graph.compilation for graph in self.graphs), *self.unprofitable)]
        remembered = (finding.verdict for finding in findings if finding is not None and finding.verdict is not None)
        return self.autotuner.verdict or next(remembered, None)

    @property
    def verdicts(self) -> list[tuple[str, Verdict]]:
        """What was decided, with the name of what it was about."""
        found = [] if self.verdict is None else [(self.name, self.verdict)]
        for graph in self.graphs:
            if graph.autotuner is not None and graph.autotuner is not self.autotuner and graph.autotuner.verdict:
                found.append((graph.compilation.capture.name, graph.autotuner.verdict))
        return found

    def current_graphs(self) -> list[CompiledGraph]:
        """Return the graphs, of those with dynamic shapes only what ran last."""
        others = {id(graph) for family in self.families for graph in family.buckets.values()}
        return [graph for graph in self.graphs if id(graph) not in others] + [each.latest for each in self.families]

    def state(self) -> State:
        """Return whether anything about its graphs is still being decided, and where in that it is."""
        if self.falls_back:
            return State(graph=self.name, stage=Stage.FALLS_BACK, detail=self.fallbacks[0][1])
        running = [graph for graph in self.current_graphs() if graph.has_run]
        if not running and not self.fallbacks:
            return State(graph=self.name, stage=Stage.MEASURING, detail="not called yet")
        waits = [graph.progress for graph in running]
        waits += [g.autotuner.progress for g in running if g.autotuner is not None and not g.autotuner.is_settled]
        wait = next((wait for wait in waits if wait is not None), None)
        if wait is not None:
            return State(graph=self.name, stage=Stage.MEASURING, detail=wait)
        rest = ", ".join(name for name, _ in self.fallbacks)
        return State(graph=self.name, stage=Stage.SETTLED, detail=f"Inductor runs {rest}" if rest else "")

    def _keep_verdict(self, verdict: Verdict) -> None:
        _logger.info("%s: chosen by measuring: %s", self.name, verdict)
        is_worth_keeping = verdict.standings[0].num_rounds >= MIN_ROUNDS
        is_inductor_known = verdict.has_met(Variant.INDUCTOR) or not self.autotuner.is_watched
        for graph in self.autotuned:
            if graph.has_run and is_worth_keeping:
                self.warm_start.keep(graph.compilation, graph.variant, verdict)
            if is_inductor_known and all(other.has_run for other in self.autotuned):
                graph.compile_whole = None  # it holds a graph; later comparisons are held among what is compiled now
            if not self.target.is_synchronous:  # what lost holds much memory, and no drift is looked for there
                graph.variants.unload_others()
        self.target.keep_only({graph.variant for graph in self.autotuned} | {Variant.PLAN})
        self.target.trim_memory()  # each variant left its own behind
