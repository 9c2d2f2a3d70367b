"""The order of comparisons in autotuning.

    1. The plan is compared with the serial plan, and with the list schedule if that is predicted to be about as fast;
       on a GPU also with the variants whose lanes share units. They share their code, so nothing is compiled.
    2. Inductor compiles the whole graphs, and they are compared with the winner. If a plan is ahead by `CLEAR`,
       Inductor's whole graphs would have to beat Inductor's own segments by that much, so the compile is postponed
       until it takes no more than `plan.compile_share` of the time that the training loop has run.
    3. If another variant was faster for one of the graphs alone, the mixture is compared with the winner; not where all
       graphs of a model have to run the same variant.

A verdict takes `MIN_ROUNDS` rounds that count: with fewer, the incumbent stays, which is the plan at first.

With several ranks, all compare the selections that the first rank to begin proposes, and use the times of the first
rank to end a round. Everything else follows from these and from the number of steps, so all ranks run the same variants
in the same step and reach the same verdict: Note [What ranks agree on] in `distributed/ranks.py`. Inductor is compared
whatever the lead, provided that it compiles every graph on every rank: a rank on which a compile fails proposes a
comparison without Inductor at once, and the others propose theirs one step after they compiled.
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
MIXTURE = "best of each graph"
SIMPLEST_FIRST = (
    Variant.INDUCTOR,
    Variant.SERIAL,
    Variant.NARROW,
    Variant.LISTED,
    Variant.PLAN,
)


class TunableGraph(Protocol):
    """One graph of the model, as autotuning sees it."""

    @property
    def available(self) -> Sequence[Variant]:
        """Variants that it can run now: `SERIAL`, `LISTED`, `PLAN`, `INDUCTOR`."""

    @property
    def is_bound(self) -> bool:
        """Whether all graphs of its model have to run the same variant, `INDUCTOR` included.

        They have to on a GPU, where a backward's CUDA graph reads what its forward saved in CUDA-graph memory, which is
        separate for each variant. A bound graph can run every variant, even one that is not in `available`.
        """

    @property
    def has_run(self) -> bool:
        """Whether it was ever called."""

    @property
    def is_settled(self) -> bool:
        """Whether its plan is final."""

    @property
    def remembered(self) -> Verdict | None:
        """The verdict of an earlier process, which it follows; None if there is none."""

    @property
    def topic(self) -> str:
        """Its name among the ranks."""

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on."""

    @property
    def prepare_ns(self) -> int:
        """Approximate time that `prepare` takes; 0 if it has nothing to do."""

    def prepare(self) -> None:
        """Compile the whole graph with Inductor, so that `INDUCTOR` becomes available."""

    def adopt_variant(self) -> Variant:
        """After autotuning: if the list schedule runs, make it the plan; return the current variant."""

    def keep(self, variants: Collection[Variant]) -> None:
        """Release the device memory that all other variants hold for their next step; they can still be used."""


class ComparisonAgreement:
    """Makes all ranks use the same selections and the same times of every round.

    Arguments:
        ranks: the ranks that must reach the same verdict.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._num_rounds, self._num_proposals = itertools.count(), itertools.count()

    def agree(
        self, selections: Mapping[str, Selection], running: Collection[int], graphs: Sequence[TunableGraph]
    ) -> tuple[Mapping[str, Selection], Collection[int]]:
        """Return the selections that all ranks compare, and the indices of the graphs whose times count.

        Arguments:
            selections: what this rank proposes to compare.
            running: indices of the graphs that have run here.
            graphs: the graphs of the model; their topics are part of the topic of every proposal.

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
        """Return the times of a round that all ranks use."""
        if self.ranks.is_alone:
            return measured
        topic = f"{_topic_of(graphs)}/round {next(self._num_rounds)}"
        settled = self.ranks.settle(topic, json.dumps({"times": to_json(measured)}))
        found = from_json(_Settled, json.loads(settled)).by_graph()
        if found.keys() != measured.keys():
            raise ValueError(f"{topic} is of {sorted(found)} on another rank, and of {sorted(measured)} on this one")
        return found


def _topic_of(graphs: Sequence[TunableGraph]) -> str:
    """Return one topic for the graphs of a model; it differs on a rank that could not compile all of them."""
    return hashlib.sha256(" ".join(graph.topic for graph in graphs).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known before a decision."""

    verdict: Verdict | None
    """The previous one."""
    is_first: bool
    """Whether this process has no verdict yet about the graphs that run."""
    is_inductor_due: bool
    """Whether Inductor should compile even if a plan is clearly ahead: it pays off by now, or drift is not watched."""


class Procedure:
    """One decision about the graphs of a model.

    Arguments:
        graphs: the graphs of the model.
        known: what is known before it.
        agreement: with the other ranks.
        trim_memory: gives free memory back to the system; called before Inductor compiles.
    """

    def __init__(
        self,
        graphs: Sequence[TunableGraph],
        known: Known,
        agreement: ComparisonAgreement,
        trim_memory: Callable[[], None],
    ) -> None:
        self.graphs = tuple(graphs)
        self.compared = indices_of_running(self.graphs)
        """Indices of the graphs that had run when it began, on all ranks."""
        self._known = known
        self._agreement = agreement
        self._trim_memory = trim_memory
        self._prepared_ns = 0
        """Time that Inductor spent compiling for it."""

    def run(self) -> Generator[Comparison | None, None, Verdict]:
        """Run the comparisons in order and return the verdict.

        Each yield is a comparison, which is over when the generator resumes, or None for a step without a comparison.
        """
        known, last = self._known, self._known.verdict
        is_inductor_known = not known.is_first and last is not None and last.has_compared(Variant.INDUCTOR)
        running: Collection[int] = self.compared
        if known.is_first and any(Variant.INDUCTOR in self.graphs[place].available for place in running):
            self._prepare(running)  # some have been compiled by Inductor before
        selections, running = self._agreement.agree(self._selections_of(SIMPLEST_FIRST), running, self.graphs)
        results = Results(sorted(running), lambda measured: self._agreement.settle(measured, self.graphs))
        incumbent = next(
            (name for name, each in selections.items() if last and each == last.selection), list(selections)[-1]
        )
        winner = yield from results.hold(selections, incumbent)
        is_clear = winner in (Variant.LISTED, Variant.PLAN) and results.ratios.get(Variant.SERIAL, 1.0) >= CLEAR
        has_met = is_inductor_known or Variant.INDUCTOR in selections
        if not has_met and (known.is_inductor_due or not is_clear):
            self._prepare(running)
            rivals = yield from self._selections_with_inductor(winner, selections[winner], running)
            if len(rivals) > 1:
                winner = yield from results.hold(rivals, winner)
        mixture = None if any(graph.is_bound for graph in self.graphs) else results.mixture(winner)
        if mixture is not None:
            winner = yield from results.hold({winner: results.selections[winner], MIXTURE: mixture}, winner)
        self.compared = frozenset(running)
        return results.verdict(winner, prepare_ns=self._prepared_ns)

    def use(self, selection: Selection) -> None:
        """Set the variant of every graph, from the next call on."""
        for graph, variant in zip(self.graphs, selection, strict=True):
            graph.use(variant)

    def _prepare(self, running: Collection[int]) -> None:
        self._trim_memory()
        begin = time.perf_counter_ns()
        for place in sorted(running):
            self.graphs[place].prepare()
        self._prepared_ns += time.perf_counter_ns() - begin

    def _selections_with_inductor(
        self, winner: str, selection: Selection, running: Collection[int]
    ) -> Generator[None, None, Mapping[str, Selection]]:
        """Return the selections to compare after Inductor compiled: `winner` alone if that failed on any rank."""
        rivals: Mapping[str, Selection] = {**self._selections_of((Variant.INDUCTOR,)), winner: selection}
        if self._agreement.ranks.is_alone:
            return rivals
        self.use(selection)
        if all(Variant.INDUCTOR in self.graphs[place].available for place in running):
            yield None  # for one step, so that a rank on which it failed proposes first
            rivals, _ = self._agreement.agree(rivals, running, self.graphs)
        else:
            rivals, _ = self._agreement.agree({winner: selection}, running, self.graphs)
            yield None
        return rivals

    def _selections_of(self, variants: Sequence[Variant]) -> dict[str, Selection]:
        """Return the distinct selections of these variants; equal selections keep the first name."""
        found: dict[Selection, str] = {}
        for variant in variants:
            has = [variant in graph.available for graph in self.graphs]
            lacking = (g for g in self.graphs if g.is_bound and g.has_run and variant not in g.available)
            is_refused = variant is Variant.INDUCTOR and any(True for _ in lacking)
            if any(has) and not is_refused:
                found.setdefault(tuple(nearest(graph, variant) for graph in self.graphs), variant)
        return {name: selection for selection, name in found.items()}


def indices_of_running(graphs: Sequence[TunableGraph]) -> frozenset[int]:
    """Return the indices of the graphs that were ever called."""
    return frozenset(place for place, graph in enumerate(graphs) if graph.has_run)


def nearest(graph: TunableGraph, variant: Variant) -> Variant:
    """Return the variant, or the simplest available one where the graph lacks it, as with a serial plan.

    A graph without a separate list schedule runs its plan, which may be that schedule.
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
    """The selections to compare, as written to the store."""

    selections: Mapping[str, Selection]
    graphs: tuple[int, ...]
    """Indices of those that have run: a round without one of them does not count."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """A round as written to the store."""

    times: Mapping[str, Mapping[str, float]]

    def by_graph(self) -> Round:
        """Return the round with integer keys, which JSON objects do not have."""
        return {name: {int(graph): ns for graph, ns in times.items()} for name, times in self.times.items()}
