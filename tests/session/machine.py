"""A model whose graphs take times that the test makes up, and a machine that runs its steps."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.comparison import MAX_ROUNDS, MIN_ROUNDS, STEPS_PER_TURN
from apollo_compile.session.drift import DRIFT_STEPS, WATCH_EVERY

SERIAL, LISTED, PLAN, INDUCTOR = Variant.SERIAL, Variant.LISTED, Variant.PLAN, Variant.INDUCTOR
NARROW = Variant.NARROW

ENOUGH = 5 * MAX_ROUNDS * STEPS_PER_TURN * 3
"""Steps in which every comparison ends."""

WINDOW = DRIFT_STEPS * WATCH_EVERY
"""Steps between two looks at how long they take."""


@dataclass(eq=False)
class Graph:
    """A graph whose variants take a given time."""

    times: Mapping[str, float]
    available: list[str] = field(default_factory=lambda: [SERIAL, PLAN])
    variant: str = PLAN
    is_settled: bool = True
    has_run: bool = False
    num_prepared: int = 0
    prepare_ns: int = 10**15
    """So long that nobody waits for it."""
    remembered: Verdict | None = None
    topic: str = "graph"
    used: list[str] = field(default_factory=list)
    kept: list[list[str]] = field(default_factory=list)
    """Variants that kept their memory, whenever that changed."""
    is_bound: bool = False
    is_compilable: bool = True
    """Whether Inductor can compile it whole."""

    def use(self, variant: str) -> None:
        assert variant == PLAN or variant in self.available or (self.is_bound and variant != INDUCTOR)
        self.variant = variant

    def prepare(self) -> None:
        self.num_prepared += 1
        self.prepare_ns = 0
        if self.is_compilable:
            self.available.append(INDUCTOR)

    def adopt_variant(self) -> str:
        if self.variant == LISTED:
            self.times, self.variant = {**self.times, PLAN: self.times[LISTED]}, PLAN
            self.available.remove(LISTED)
        return self.variant

    def keep(self, available: Collection[str]) -> None:
        found = sorted(set(available))
        if not self.kept or self.kept[-1] != found:
            self.kept.append(found)


COMPILE_SHARE = 0.05


class Machine:
    """Runs steps of a model with the noise of a shared machine: drift, spikes, and a cold step after every change."""

    def __init__(self, *graphs: Graph, seed: int = 0, noise: float = 0.0, ranks: Ranks | None = None) -> None:
        self.graphs, self.noise = graphs, noise
        self.verdicts: list[Verdict] = []
        self.tidied: list[int] = []
        """Steps that had begun whenever memory was to be given back."""
        self.autotuner = Autotuner(
            graphs,
            self.verdicts.append,
            ranks,
            trim_memory=lambda: self.tidied.append(len(graphs[0].used)),
            compile_share=COMPILE_SHARE,
        )
        self.speed = 1.0
        self.num_watched = 0
        """Calls that the selection looked at."""
        self._random = random.Random(seed)
        self._last: list[str] = []

    def step(self, *only: int) -> float:
        """Run the graphs, or some of them; return the time."""
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


def earlier(variant: str) -> Verdict:
    """Return a verdict of an earlier process."""
    standing = Standing(name=variant, step_ns=1.0, ratio=1.0, num_rounds=MIN_ROUNDS)
    return Verdict(winner=variant, selection=(variant,), standings=(standing,), num_steps=30, is_remembered=True)


class CountingStore:
    """A store that counts how often it is asked."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_calls = 0

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self.num_calls += 1
        return self._store.compare_set(key, expected, desired)


def ranks_with(store: CountingStore, *times: Mapping[str, float], noise: float = 0.0) -> list[Machine]:
    """Return one machine per rank; each has a forward and a backward that take these times."""
    return [
        Machine(Graph(own), Graph(own), seed=rank, noise=noise, ranks=Ranks(store)) for rank, own in enumerate(times)
    ]


def run_in_step(ranks: Sequence[Machine], steps: int, seed: int) -> None:
    """Run all ranks as collectives make them run: nobody begins a step before all have begun the one before."""
    order = random.Random(seed)
    for _ in range(steps):
        for rank in order.sample(ranks, len(ranks)):
            rank.step()
