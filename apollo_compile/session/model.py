"""All graphs that come from one Dynamo graph: their variants, fallbacks with reasons, and the state of autotuning."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from apollo_compile.autotune.candidates import Candidate, CompileBudget
from apollo_compile.autotune.comparison import PER_CALL, PER_TURN, Rules
from apollo_compile.autotune.graphs import GraphTuner
from apollo_compile.autotune.tuner import Tuner
from apollo_compile.config import Config
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import GraphBreak, Role, Variant, Verdict
from apollo_compile.ir.text import format_count
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.planning import Fallback
from apollo_compile.session.warm_start import WarmStart
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, Run, Target
from apollo_compile.torch_bridge.boundary import Boundary

_logger = logging.getLogger(__name__)

NOT_YET = "torch.compile is not compared yet"
"""Note on a verdict without torch.compile, whose compile waits until it is a small share of the training time."""

CLEAR = 1.20
"""Least speed-up of a plan over its segments in turn for which Inductor's whole graph waits for the compile budget: it
would have to beat Inductor's own segments by as much."""


@dataclass(eq=False, kw_only=True)
class CompiledModel:
    """Owns the graphs of one Dynamo graph, and the tuner that selects their variant."""

    name: str
    """Name of the Dynamo graph; the names of its graphs begin with it."""
    config: Config
    target: Target
    storages: frozenset[Hashable] = frozenset()
    """Storages of the tensors that it was compiled for; a report finds it by a module's parameters among them."""
    code: frozenset[CodeType] = frozenset()
    """Code objects that it was traced from; by them, a report finds a graph that reads no parameter."""
    graphs: list[CompiledGraph] = field(default_factory=list)
    tuned: list[CompiledGraph] = field(default_factory=list)
    """Graphs whose variant the tuner selects."""
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of every fallback: of the whole Dynamo graph, or of one of its graphs."""
    unprofitable: list[Compilation] = field(default_factory=list)
    """Plans that were not worth compiling, of graphs that fall back."""
    again: str = ""
    """Why Dynamo compiled the code again, as the end of a phrase; empty for a first compile."""
    called: weakref.ref[Callable[..., Any]] | None = None
    """The argument of `torch.compile`, where it is known."""
    kind: type | None = None
    """Class of `called`, which may be gone: Dynamo shares compiled code between the instances of a class."""
    num_before: int = 0
    """Number of other graphs of the same call that were compiled before."""
    has_warned: bool = False
    """Whether a warning about the many graphs of its call was logged."""
    graph_break: GraphBreak | None = None
    """The graph break that ended the Dynamo graph; None where it ended with the function."""
    ranks: Ranks = field(default_factory=lambda: Ranks(None))
    """The ranks that must run the same plans and variants."""
    without_lanes: str | None = None
    """Why it cannot run on lanes; None if it may."""
    clock: Callable[[], int] = time.perf_counter_ns
    """Time of the host in nanoseconds."""
    is_for_step: bool = False
    """Whether its graphs are to be linked into a training step; until then they run their plans, uncompared."""
    tuner: GraphTuner = field(init=False)
    warm_start: WarmStart = field(init=False)

    def __post_init__(self) -> None:
        """Create the tuner and the warm start for the graphs to come."""
        target = self.target
        tuner = Tuner(
            self.name,
            rules=rules_of(target),
            budget=CompileBudget(self.config.plan.compile_share, self.clock),
            tell=self._keep_verdict,
            keep=self._keep_variants,
            trim_memory=target.trim_memory,
            clock=self.clock,
            now_ns=target.now_ns,
        )
        self.tuner = GraphTuner(self.tuned, tuner, self._candidates)
        self.tuner.is_paused = self.is_for_step
        self.warm_start = WarmStart(
            name=self.name,
            config=self.config,
            target=target,
            is_alone=self.ranks.is_alone,
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
        boundary: Boundary | None = None,
        sized: Sequence[int] = (),
    ) -> CompiledGraph:
        """Return a graph that runs in segments, whether they were compiled now or by an earlier process.

        Arguments:
            compilation: its first plan.
            code: its bodies, and the contract with its caller.
            compile_whole: compiles the whole graph as Inductor alone would; None where variants are not compared.
            boundary: its inputs and outputs that are not tensors.
            sized: positions of its tensors whose sizes change.
        """
        if sized:
            self.tuner.tuner.is_watched = False
        return CompiledGraph(
            first=compilation,
            code=code,
            config=self.config,
            target=self.target,
            compile_whole=compile_whole,
            tuner=None if compile_whole is None or not self.ranks.is_alone else self.tuner,
            is_alone=self.ranks.is_alone,
            boundary=boundary,
            sized=sized,
        )

    def add(self, graph: CompiledGraph) -> None:
        """Add a graph that was compiled in segments."""
        self.graphs.append(graph)
        if graph.tuner is not None:
            self.tuned.append(graph)

    def forget_graphs(self) -> None:
        """Drop all graphs: the Dynamo graph is compiled again."""
        for known in (self.graphs, self.tuned, self.unprofitable, self.fallbacks):
            known.clear()

    def fall_back(self, fallback: Fallback) -> None:
        """Let the whole Dynamo graph fall back to torch.compile, and log why."""
        self.add_fallback(self.name, fallback)

    def add_fallback(self, name: str, fallback: Fallback) -> None:
        """Add a fallback, and log why."""
        self.fallbacks.append((name, fallback.reason))
        if fallback.unprofitable is not None:
            self.unprofitable.append(fallback.unprofitable)
        compiler = "torch.compile" if name == self.name else "Inductor"
        _logger.log(fallback.level, "%s falls back to %s: %s", name, compiler, fallback.reason)

    @property
    def falls_back(self) -> bool:
        """Whether the whole Dynamo graph falls back to torch.compile: Note [fallback] in `compile.py`."""
        return any(name == self.name for name, _ in self.fallbacks)

    def add_to_reason(self, detail: str) -> None:
        """Append a detail to the reason of the latest fallback."""
        name, reason = self.fallbacks.pop()
        self.fallbacks.append((name, f"{reason}; {detail}"))

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of autotuning, from an earlier process if not from this one."""
        findings = [item.finding for item in (*(graph.compilation for graph in self.graphs), *self.unprofitable)]
        remembered = (finding.verdict for finding in findings if finding is not None and finding.verdict is not None)
        return self.tuner.verdict or next(remembered, None)

    @property
    def verdicts(self) -> list[tuple[str, Verdict]]:
        """The verdict with the name of the model; empty without one."""
        return [] if self.verdict is None else [(self.name, self.verdict)]

    def running_variants(self) -> list[Variant]:
        """Return the variants of the graphs that have run; a serial plan counts as `SERIAL`."""
        return [
            graph.variant if graph.variant != Variant.PLAN or graph.compilation.plan.uses_lanes else Variant.SERIAL
            for graph in self.graphs
            if graph.has_run
        ]

    @property
    def writes(self) -> bool:
        """Whether a graph writes to something else than its outputs, so that a call cannot be repeated."""
        return any(graph.code.contract.writes for graph in self.graphs)

    def failure(self) -> str | None:
        """Return why its graphs can no longer run as they should; None if they can."""
        failed = next((graph.learner.failure for graph in self.graphs if graph.learner.failure), None)
        return self.target.failure() or failed

    def release(self) -> None:
        """Drop all graphs with the memory that they hold; backwards of forwards that have run still work."""
        for graph in self.graphs:
            graph.tuner = None
            graph.variants.release_others(())
        self.target.keep_only(())

    def state(self) -> State:
        """Return whether its graphs are settled, still measuring, or fall back, with the details."""
        if self.falls_back:
            return State(graph=self.name, stage=Stage.FALLS_BACK, detail=self.fallbacks[0][1])
        running = [graph for graph in self.graphs if graph.has_run]
        if not running and not self.fallbacks:
            return State(graph=self.name, stage=Stage.MEASURING, detail="not called yet")
        is_compared = any(graph.tuner is not None for graph in running)
        runs_left = max((graph.runs_left for graph in running), default=0)
        if runs_left or (is_compared and not self.tuner.is_settled):
            return State(
                graph=self.name,
                stage=Stage.MEASURING,
                detail="" if runs_left else self.tuner.progress,
                num_steps=runs_left + (self.tuner.steps_left if is_compared else 0),
                left_ns=0 if runs_left else self.tuner.left_ns,
            )
        num_lanes = max((graph.compilation.plan.num_lanes for graph in running), default=0)
        parts = [describe_result(self.verdict, self.running_variants(), num_lanes)] if running else []
        parts += [NOT_YET] * (is_compared and self.tuner.tuner.is_more_to_come)
        parts += [f"Inductor runs {name}" for name, _ in self.fallbacks]
        num_steps = 0 if self.verdict is None or self.verdict.is_remembered else self.verdict.num_steps
        return State(graph=self.name, stage=Stage.SETTLED, detail="; ".join(parts), num_steps=num_steps)

    # ------------------------------------------------------------------------------------------------- autotuning

    def _candidates(self) -> list[Candidate]:
        """Return the variants to compare: all graphs run the same, those with a serial plan the serial variant."""
        running = [graph for graph in self.tuned if graph.has_run]
        is_compiled = all(Variant.INDUCTOR in graph.variants.available for graph in running)
        inductor = Candidate(
            variant=Variant.INDUCTOR,
            prepare=self._prepare_whole,
            cost_ns=sum(graph.prepare_ns for graph in running),
            is_late=not is_compiled,
            is_urgent=self._is_inductor_urgent,
        )
        uses_lanes = any(graph.compilation.plan.uses_lanes for graph in running)
        own = (Variant.SERIAL, Variant.PLAN) if uses_lanes else (Variant.SERIAL,)
        return [inductor, *(Candidate(variant=variant) for variant in own)]

    def _is_inductor_urgent(self, verdict: Verdict) -> bool:
        """Whether Inductor compiles whole graphs at once: not for CUDA graphs, and not where the plan leads clearly."""
        serial = next((each for each in verdict.standings if each.name == Variant.SERIAL), None)
        is_clear = verdict.winner is Variant.PLAN and serial is not None and serial.ratio >= CLEAR
        return not (self.target.captures or is_clear)

    def _prepare_whole(self) -> None:
        for graph in self.tuned:
            if graph.has_run:
                graph.prepare()

    def _keep_variants(self, variants: Collection[Variant]) -> None:
        """Release the memory that other variants hold; a variant that runs again is captured again."""
        for graph in self.tuned:
            graph.variants.release_others(variants)
        if not self.tuner.tuner.is_comparing:  # the winner is captured again, with memory for it alone
            self.target.keep_only(variants)

    def _keep_verdict(self, verdict: Verdict) -> None:
        for graph in self.tuned:
            if graph.has_run and verdict.is_reliable:
                self.warm_start.keep(graph.compilation, graph.variant_for(verdict.winner), verdict)
            if verdict.has_compared(Variant.INDUCTOR) and all(other.has_run for other in self.tuned):
                graph.compile_whole = None  # frees an FX graph; later comparisons take compiled variants
        self.target.trim_memory()  # every variant left free blocks


def rules_of(target: Target) -> Rules:
    """Return how the steps of a device are timed."""
    return PER_CALL if target.calls_wait else PER_TURN


def describe_result(verdict: Verdict | None, variants: Iterable[Variant], num_lanes: int) -> str:
    """Return speed-up and variant of the winner, as in `1.42x as fast as torch.compile (plan on 2 lanes)`."""
    names = dict.fromkeys([verdict.winner] if verdict is not None else variants)
    runs = ", ".join(f"plan on {format_count(num_lanes, 'lane')}" if x is Variant.PLAN else x for x in names)
    earlier = ", measured in an earlier run" if verdict is not None and verdict.is_remembered else ""
    summary = "" if verdict is None else verdict.summary
    return f"{summary} ({runs}){earlier}" if summary else runs
