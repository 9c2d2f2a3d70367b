"""A model whose graphs take times that the test makes up, and a machine with a clock that runs its steps."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apollo_compile.autotune.candidates import Candidate, CandidateError, CompileBudget
from apollo_compile.autotune.comparison import MAX_ROUNDS, PER_CALL
from apollo_compile.autotune.drift import DRIFT_SAMPLES, LOOK_EVERY
from apollo_compile.autotune.graphs import GraphTuner
from apollo_compile.autotune.tuner import Tuner
from apollo_compile.ir import MIN_ROUNDS, Standing, Variant, Verdict

SERIAL, PLAN, INDUCTOR = Variant.SERIAL, Variant.PLAN, Variant.INDUCTOR
LOOP, TRACED = Variant.LOOP, Variant.TRACED

STEPS_PER_TURN = PER_CALL.steps_per_turn

MS, S = 1_000_000, 1_000_000_000

ENOUGH = 5 * MAX_ROUNDS * STEPS_PER_TURN * 3
"""Steps in which every comparison ends."""

WINDOW = DRIFT_SAMPLES * LOOK_EVERY
"""Steps between two looks at their duration."""

COMPILE_SHARE = 0.05

CLEAR = 1.2
"""Lead of the plan from which Inductor's compile waits for the budget."""


@dataclass(eq=False)
class Graph:
    """A graph whose variants take a given time, in milliseconds."""

    times: Mapping[str, float]
    variant: Variant = PLAN
    is_settled: bool = True
    has_run: bool = False
    remembered: Verdict | None = None
    used: list[Variant] = field(default_factory=list)

    def use(self, variant: Variant) -> None:
        self.variant = variant


class Machine:
    """Runs steps of a model with the noise of a shared machine: drift, spikes, and a cold step after every change.

    Inductor takes `compile_s` seconds to compile the graphs whole, or fails.
    """

    def __init__(
        self, *graphs: Graph, seed: int = 0, noise: float = 0.0, compile_s: float = 1e6, is_compilable: bool = True
    ) -> None:
        self.graphs, self.noise, self.compile_s, self.is_compilable = graphs, noise, compile_s, is_compilable
        self.now_ns = 0
        self.verdicts: list[Verdict] = []
        self.kept: list[set[str]] = []
        """Variants that kept their memory, whenever that changed."""
        self.num_prepared = 0
        self.is_interrupted = False
        """Whether the next compile is interrupted."""
        self.tuner = Tuner(
            "a model",
            budget=CompileBudget(COMPILE_SHARE, lambda: self.now_ns),
            tell=self.verdicts.append,
            keep=self._keep,
            clock=lambda: self.now_ns,
        )
        self.autotuner = GraphTuner(graphs, self.tuner, self._candidates)
        self.speed = 1.0
        self.num_watched = 0
        """Calls that the tuner looked at."""
        self._random = random.Random(seed)

    def _keep(self, variants: Collection[str]) -> None:
        if not self.kept or self.kept[-1] != set(variants):
            self.kept.append(set(variants))

    def _candidates(self) -> list[Candidate]:
        inductor = Candidate(
            variant=INDUCTOR,
            prepare=self._prepare,
            cost_ns=round(1e9 * self.compile_s),
            is_late=not self.num_prepared,
            is_urgent=lambda verdict: (
                not (verdict.winner == PLAN and any(s.name == SERIAL and s.ratio >= CLEAR for s in verdict.standings))
            ),
        )
        return [inductor, Candidate(variant=SERIAL), Candidate(variant=PLAN)]

    def _prepare(self) -> None:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        self.num_prepared += 1
        if not self.is_compilable:
            raise CandidateError("no compiler")

    def step(self, *only: int) -> float:
        """Run the graphs, or some of them; return the time in nanoseconds."""
        total = 0.0
        self.speed *= 1 + self.noise / 10 * self._random.uniform(-1, 1)
        for index, graph in enumerate(self.graphs):
            if only and index not in only:
                continue
            is_watched = not self.autotuner.skips(graph)
            self.num_watched += is_watched
            if is_watched:
                self.autotuner.enter(graph)
            ns = 1e6 * graph.times[graph.variant] * self.speed * (1 + self.noise * self._random.random())
            if self._random.random() < self.noise:
                ns *= 2  # a neighbour's turn
            if graph.used and graph.used[-1] != graph.variant:
                ns *= 1.5  # cold caches
            self.now_ns += round(ns)
            if is_watched:
                self.autotuner.leave(graph, round(ns))
            graph.used.append(graph.variant)
            graph.has_run = True
            total += ns
        return total

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def halves(times: Mapping[str, float], **rest: Any) -> tuple[Graph, Graph]:
    """Return a forward and a backward that take these times together."""
    forward, backward = Graph({}, **rest), Graph({}, **rest)
    slow_down(times, forward, backward)
    return forward, backward


def slow_down(times: Mapping[str, float], forward: Graph, backward: Graph) -> None:
    """Let a forward and a backward take these times together from now on."""
    forward.times = {variant: time / 3 for variant, time in times.items()}
    backward.times = {variant: time - time / 3 for variant, time in times.items()}


def earlier(variant: str, *losers: str, margin: float = 1.0, step_ns: float = 1.0) -> Verdict:
    """Return a verdict of an earlier process, in which each loser took longer than the one before by a margin."""
    standings = tuple(
        Standing(name=name, step_ns=step_ns, ratio=1.0 + place * margin, num_rounds=MIN_ROUNDS)
        for place, name in enumerate((variant, *losers))
    )
    return Verdict(standings=standings, num_steps=30, is_remembered=True)


class Subject:
    """Steps that take a given time in milliseconds by variant, on a clock; candidates as the test says."""

    def __init__(self, times: Mapping[Variant, float], *, share: float = 0.05, **rest: Any) -> None:
        self.times = dict(times)
        self.now_ns = 0
        self.used: list[Variant] = []
        self.kept: list[set[Variant]] = []
        self.prepared: list[Variant] = []
        self.verdicts: list[Verdict] = []
        self.tuner = Tuner(
            "a step",
            budget=CompileBudget(share, self.clock),
            tell=self.verdicts.append,
            keep=self._keep,
            clock=self.clock,
            now_ns=self.clock,
            **rest,
        )

    def clock(self) -> int:
        return self.now_ns

    def _keep(self, variants: Collection[Variant]) -> None:
        self.kept.append(set(variants))

    def late(self, variant: Variant, *, cost_s: float = 1.0, fails: bool = False, **rest: Any) -> Candidate:
        """Return a candidate whose compile takes so long."""

        def prepare() -> None:
            self.prepared.append(variant)
            self.now_ns += round(cost_s * S)
            if fails:
                raise CandidateError("no compiler")

        return Candidate(variant=variant, prepare=prepare, cost_ns=round(cost_s * S), is_late=True, **rest)

    def offer(self, *candidates: Variant | Candidate, incumbent: Variant = PLAN) -> Subject:
        self.tuner.offer(_as_candidates(candidates), incumbent=incumbent)
        return self

    def adopt(self, verdict: Verdict, *candidates: Variant | Candidate) -> None:
        self.tuner.adopt(verdict, _as_candidates(candidates))

    def step(self) -> Variant:
        """Take one step."""
        is_skipped = self.tuner.skip_step()
        variant = self.tuner.current if is_skipped else self.tuner.begin_step()
        ns = round(self.times[variant] * MS)
        self.now_ns += ns
        if not is_skipped:
            self.tuner.record(ns)
        self.used.append(variant)
        return variant

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @property
    def winners(self) -> Sequence[str]:
        return [verdict.winner for verdict in self.verdicts]


def _as_candidates(known: Sequence[Variant | Candidate]) -> list[Candidate]:
    return [each if isinstance(each, Candidate) else Candidate(variant=each) for each in known]
