"""How autotuning decides: one comparison after the other.

    1. The plan against its segments in turn, and against the list schedule where that is predicted to be about as fast;
       on a GPU also against the variants whose lanes share units. They are the same code, so this needs no compiling.
    2. Inductor compiles the whole graphs and meets the winner. Where a plan is ahead by `CLEAR`, Inductor's version
       would have to beat its own pieces by that much, so the compile waits until it can pay: until the training loop
       has run for so long that the compile takes no more than `COMPILE_SHARE` of that time.
    3. If another variant was faster for one of the graphs alone, the mixture meets the winner; not where all graphs of
       a model have to run the same variant.

A verdict takes `MIN_ROUNDS` comparable rounds: with fewer, what was to be beaten stays, at first the plan.

With several ranks, what is compared is what the first rank to begin proposes, and the times of a round are those of the
first rank to end it, on all ranks. All else follows from them and from the number of steps, so all ranks run the same
variants in the same step and end with the same verdict: Note [What ranks agree on] in `distributed/ranks.py`. Inductor
competes whatever the lead, if it compiles every graph on every rank: a rank where it does not says so at once, and the
others begin the comparison one step after they compiled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import Selection, Variant, Verdict
from apollo_compile.json_form import from_json, to_json
from apollo_compile.session.comparison import Comparison, Results, Round

CLEAR = 1.20
COMPILE_SHARE = 0.05
"""Of the time that the training loop has run, what Inductor's compile may take where a plan is clearly ahead."""

MIXTURE = "best of each graph"
SHARED_VARIANTS = (Variant.STREAMS, Variant.PRIORITIES, Variant.OVERLAPPING)
"""Variants that run the plan on lanes which share units, the simplest first."""

_SIMPLEST_FIRST = (Variant.INDUCTOR, Variant.SERIAL, *SHARED_VARIANTS, Variant.LISTED, Variant.PLAN)


class TunableGraph(Protocol):
    """One graph of the model, as autotuning sees it."""

    @property
    def available(self) -> Sequence[Variant]:
        """Ways that it can run now, among `SERIAL`, `LISTED`, `PLAN` and `INDUCTOR`; on a GPU, `SHARED_WAYS` too."""

    @property
    def is_bound(self) -> bool:
        """Whether all graphs of its model have to run the same way, `INDUCTOR` too.

        So it is on a GPU, where a backward replays on what its forward left in the memory of a CUDA graph, which every
        variant has of its own. A graph that is bound can run every variant, whether that is one of its own or not.
        """

    @property
    def has_run(self) -> bool:
        """Whether it was ever called."""

    @property
    def is_settled(self) -> bool:
        """Whether its plan is final."""

    @property
    def remembered(self) -> Verdict | None:
        """What an earlier process decided, by which it runs; None if that is to be found out."""

    @property
    def topic(self) -> str:
        """Its name among the ranks."""

    def use(self, variant: Variant) -> None:
        """Run this way from the next call on."""

    @property
    def prepare_ns(self) -> int:
        """How long `prepare` takes, about; 0 if there is nothing left to do."""

    def prepare(self) -> None:
        """Make `INDUCTOR` one of its ways; takes as long as a compile."""

    def adopt_variant(self) -> Variant:
        """Make the list schedule, if that is how it runs, its plan; return how it runs. The comparison is over."""

    def keep(self, variants: Collection[Variant]) -> None:
        """Let go of the device memory that all other ways keep for their next step; they can still be used."""


class ComparisonAgreement:
    """What ranks agree on while they compare: the selections, and the times of every round.

    Arguments:
        graphs: all that may take part; their names among the ranks are part of every topic.
        ranks: who must come to the same verdict.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._num_rounds, self._num_proposals = itertools.count(), itertools.count()

    def agree(
        self, selections: Mapping[str, Selection], running: Collection[int], graphs: Sequence[TunableGraph]
    ) -> tuple[Mapping[str, Selection], Collection[int]]:
        """Return what is compared on all ranks, and the places of the graphs whose times count.

        Arguments:
            selections: what this rank would compare.
            running: places of the graphs that have run here.
            graphs: of the model.

        Raises:
            RankError: one of the selections cannot run here.
        """
        if self.ranks.is_alone:
            return selections, running
        own = _Proposal(selections=selections, graphs=tuple(sorted(running)))
        topic = f"{_topic_of(graphs)}/comparison {next(self._num_proposals)}"
        agreed = from_json(_Proposal, json.loads(self.ranks.settle(topic, json.dumps(to_json(own)))))
        for name, selection in agreed.selections.items():
            lacking = [
                variant for graph, variant in zip(graphs, selection, strict=True) if not _can_run(graph, variant)
            ]
            if lacking:
                raise self.ranks.fail(f"{name!r} competes on the other ranks, and this one cannot run '{lacking[0]}'")
        return agreed.selections, agreed.graphs

    def settle(self, measured: Round, graphs: Sequence[TunableGraph]) -> Round:
        """Return the times of a round that all ranks go by."""
        if self.ranks.is_alone:
            return measured
        topic = f"{_topic_of(graphs)}/round {next(self._num_rounds)}"
        settled = self.ranks.settle(topic, json.dumps({"times": to_json(measured)}))
        found = from_json(_Settled, json.loads(settled)).by_graph()
        if found.keys() != measured.keys():
            raise ValueError(f"{topic} is of {sorted(found)} on another rank, and of {sorted(measured)} on this one")
        return found


def _topic_of(graphs: Sequence[TunableGraph]) -> str:
    """Name the graphs of a model among the ranks: where one of them could not be compiled, they are others."""
    return hashlib.sha256(" ".join(graph.topic for graph in graphs).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a decision begins with."""

    verdict: Verdict | None
    """The one before."""
    is_first: bool
    """Whether this process has not decided yet about the graphs that run."""
    is_inductor_due: bool
    """Whether Inductor's compile can pay, or nobody will look again."""


class Procedure:
    """One decision about the graphs of a model.

    Arguments:
        graphs: of the model.
        known: what it begins with.
        agreement: with whom it is taken.
        trim_memory: called before Inductor compiles.
    """

    def __init__(
        self,
        graphs: Sequence[TunableGraph],
        known: Known,
        agreement: ComparisonAgreement,
        trim_memory: Callable[[], None],
    ) -> None:
        self.graphs = tuple(graphs)
        self.compared = places_of_running(self.graphs)
        """Places of the graphs that had run when it began, on all ranks."""
        self._known = known
        self._agreement = agreement
        self._trim_memory = trim_memory
        self._prepared_ns = 0
        """How long Inductor compiled for it."""

    def run(self) -> Generator[Comparison | None, None, Verdict]:
        """Hold one comparison after the other.

        Each yield is a comparison that is over when the generator goes on, or None for one step in which none is held.
        """
        known, last = self._known, self._known.verdict
        is_inductor_known = not known.is_first and last is not None and last.has_met(Variant.INDUCTOR)
        running: Collection[int] = self.compared
        if known.is_first and any(Variant.INDUCTOR in self.graphs[place].available for place in running):
            self._prepare(running)  # of the others it is known what Inductor makes of them
        selections, running = self._agreement.agree(self._selections_of(_SIMPLEST_FIRST), running, self.graphs)
        results = Results(sorted(running), lambda measured: self._agreement.settle(measured, self.graphs))
        incumbent = next(
            (name for name, each in selections.items() if last and each == last.selection), list(selections)[-1]
        )
        winner = yield from results.hold(selections, incumbent)
        is_clear = winner in (Variant.LISTED, Variant.PLAN) and results.ratios.get(Variant.SERIAL, 1.0) >= CLEAR
        has_met = is_inductor_known or Variant.INDUCTOR in selections
        if not has_met and (known.is_inductor_due or not is_clear):
            self._prepare(running)
            rivals = yield from self._meet_inductor(winner, selections[winner], running)
            if len(rivals) > 1:
                winner = yield from results.hold(rivals, winner)
        mixture = None if any(graph.is_bound for graph in self.graphs) else results.mixture(winner)
        if mixture is not None:
            winner = yield from results.hold({winner: results.selections[winner], MIXTURE: mixture}, winner)
        self.compared = frozenset(running)
        return results.verdict(winner, prepare_ns=self._prepared_ns)

    def use(self, selection: Selection) -> None:
        """Let every graph run its variant from the next call on."""
        for graph, variant in zip(self.graphs, selection, strict=True):
            graph.use(variant)

    def _prepare(self, running: Collection[int]) -> None:
        self._trim_memory()
        begin = time.perf_counter_ns()
        for place in sorted(running):
            self.graphs[place].prepare()
        self._prepared_ns += time.perf_counter_ns() - begin

    def _meet_inductor(
        self, winner: str, selection: Selection, running: Collection[int]
    ) -> Generator[None, None, Mapping[str, Selection]]:
        """Return what competes after Inductor compiled: `winner` alone if it could not, on whichever rank that was."""
        rivals: Mapping[str, Selection] = {**self._selections_of((Variant.INDUCTOR,)), winner: selection}
        if self._agreement.ranks.is_alone:
            return rivals
        self.use(selection)
        if all(Variant.INDUCTOR in self.graphs[place].available for place in running):
            yield None  # a step, in which a rank where that is not so can say it
            rivals, _ = self._agreement.agree(rivals, running, self.graphs)
        else:
            rivals, _ = self._agreement.agree({winner: selection}, running, self.graphs)
            yield None
        return rivals

    def _selections_of(self, variants: Sequence[Variant]) -> dict[str, Selection]:
        """Return the distinct selections of these variants; the first name of a selection stays."""
        found: dict[Selection, str] = {}
        for variant in variants:
            has = [variant in graph.available for graph in self.graphs]
            lacking = (g for g in self.graphs if g.is_bound and g.has_run and variant not in g.available)
            is_refused = variant is Variant.INDUCTOR and any(True for _ in lacking)
            if any(has) and not is_refused:
                found.setdefault(tuple(nearest(graph, variant) for graph in self.graphs), variant)
        return {name: selection for selection, name in found.items()}


def places_of_running(graphs: Sequence[TunableGraph]) -> frozenset[int]:
    """Return the places of the graphs that were ever called."""
    return frozenset(place for place, graph in enumerate(graphs) if graph.has_run)


def nearest(graph: TunableGraph, variant: Variant) -> Variant:
    """Return the variant, or the simplest that the graph has: its plan may be to run in turn.

    A graph without a list schedule of its own runs its plan, which may be that.
    """
    if graph.is_bound and (variant is not Variant.INDUCTOR or variant in graph.available):
        return variant
    if variant is Variant.LISTED:
        order: Sequence[Variant] = (Variant.LISTED, Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR)
    else:
        order = (variant, Variant.SERIAL, Variant.INDUCTOR, Variant.PLAN)
    return next(each for each in order if each in graph.available)


def _can_run(graph: TunableGraph, variant: Variant) -> bool:
    return variant in graph.available or (graph.is_bound and variant is not Variant.INDUCTOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """Who competes, as it goes through the store."""

    selections: Mapping[str, Selection]
    graphs: tuple[int, ...]
    """Places of those that have run: a round without one of them does not count."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """A round as it goes through the store."""

    times: Mapping[str, Mapping[str, float]]

    def by_graph(self) -> Round:
        """Return the round; keys of a JSON object are texts."""
        return {name: {int(graph): ns for graph, ns in times.items()} for name, times in self.times.items()}
