"""Stage 9: which variant each graph of a model runs, decided by measuring in the user's own steps.

    [graphs of one model, each with its variants] -> Verdict

A plan rests on predictions, and a model must never run slower than with Inductor alone. So variants are compared by
measuring: the serial plan, the plan, the best list schedule, and the whole graphs as Inductor compiles them; on a GPU
also the plan's order on streams without quotas, on streams of different priorities, and on overlapping lanes.
`comparison.py` has the statistics of one comparison, `procedure.py` the order of comparisons, `drift.py` the detection
of drift. This file decides when they run:

Steps       A step begins when the first graph runs after a different graph: consecutive forwards belong to one step.
            Graphs switch variants only between steps.
Memory      Before a turn, and before Inductor compiles, free memory goes back to the system: the free blocks of one
            variant do not fit the sizes that the next one needs, so memory would add up over variants. The first step
            of a turn, which is not timed, allocates again. While several models are compared at once, none of them
            trims memory, since that would disturb the timed steps of another.
Drift       The winner's steps stay watched. If their time changes, the compiled variants are compared again; if
            Inductor has not compiled yet, because a plan was ahead by `CLEAR`, that is reconsidered.
Latecomers  A graph that first runs after the verdict (the backward of a model that was evaluated before it was trained)
            finishes learning its plan; then everything is compared again, Inductor included. Not with several ranks.
Earlier     If an earlier process reached a verdict about every graph that runs (`store/history.py`), that verdict is
            adopted and watched like one of this process. After a drift, Inductor may compile, as in a first comparison.
Ranks       With several ranks drift is not watched, so a verdict is final.

Guarantees: if anything fails, all graphs run their plans and comparisons end; with several ranks, where the others go
on comparing, the step raises a `RankError` instead. An interrupt (as during an Inductor compile) restarts the
comparison with the next step; with several ranks, plans run from then on.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import RankError
from apollo_compile.ir import Variant, Verdict
from apollo_compile.session.comparison import MIN_ROUNDS, Comparison
from apollo_compile.session.drift import WATCH_EVERY, DriftWatch
from apollo_compile.session.procedure import (
    ComparisonAgreement,
    Known,
    Procedure,
    TunableGraph,
    indices_of_running,
    nearest,
)

_tuners: weakref.WeakSet[Autotuner] = weakref.WeakSet()
"""Autotuners of this process that trim memory, made by the threads that compile."""


class Autotuner:
    """Selects the variants of one model's graphs, and watches the winner afterwards.

    Arguments:
        graphs: the graphs of the model whose variant is not fixed; the one that a step runs first comes first. The list
            may grow until the first comparison.
        tell: called with every verdict.
        ranks: the ranks that must reach the same verdict.
        trim_memory: gives free memory back to the system; called before every turn, before Inductor compiles, and when
            an earlier verdict is adopted.
        is_watched: whether to detect drift afterwards; not for dynamic shapes, where times change with the sizes.
    """

    def __init__(
        self,
        graphs: Sequence[TunableGraph],
        tell: Callable[[Verdict], None],
        ranks: Ranks | None = None,
        *,
        trim_memory: Callable[[], None] | None = None,
        is_watched: bool = True,
        compile_share: float = 0.0,
    ) -> None:
        self.verdict: Verdict | None = None
        self._all_graphs = graphs
        self._graphs: tuple[TunableGraph, ...] = ()
        """The graphs of the latest decision."""
        self._compared: frozenset[int] = frozenset()
        """Indices of the graphs that had run when it began."""
        self._tell = tell
        self._ranks = ranks or Ranks(None)
        self._release_free_memory = trim_memory
        if trim_memory is not None:
            _tuners.add(self)
        self._compile_share = compile_share
        """Of the time since the verdict, which Inductor's compile may take if a plan is clearly ahead; 0 forbids it."""
        self._is_watched = is_watched and self._ranks.is_alone
        self._agreement = ComparisonAgreement(self._ranks)
        self._comparison: Comparison | None = None
        self._procedure: Procedure | None = None
        self._comparisons: Generator[Comparison | None, None, Verdict] = _no_comparisons()
        self._watch = DriftWatch()
        self._num_unwatched: float = 0
        """Steps until the next watched one, that one included; the others cost nothing."""
        self._callers: set[int] = set()
        """Threads that are between `enter` and `leave`."""
        self._last: TunableGraph | None = None
        """The graph that ran last."""
        self._is_closed = False
        self._lock = threading.Lock()

    def _trim_memory(self) -> None:
        """Trim memory, unless that would disturb the timed steps of another model."""
        trim = self._release_free_memory
        if trim is not None and not any(other.is_comparing for other in _tuners if other is not self):
            trim()

    @property
    def is_watched(self) -> bool:
        """Whether drift is detected after the verdict."""
        return self._is_watched

    @property
    def is_comparing(self) -> bool:
        """Whether a comparison is running."""
        return self._procedure is not None

    @property
    def progress(self) -> str:
        """Return the progress of the comparison that runs or comes next."""
        comparison = self._comparison
        if comparison is None:
            return f"a comparison begins, of at least {MIN_ROUNDS} rounds"
        is_inductor_to_come = Variant.INDUCTOR not in comparison.selections and any(
            graph.has_run and graph.prepare_ns for graph in self._graphs
        )
        left = comparison.steps_left(2 if is_inductor_to_come else 0)
        return f"{comparison.progress}, about {left} steps left, between {comparison.remaining_names}"

    @property
    def is_settled(self) -> bool:
        """Whether autotuning is over: there is a verdict, or there will be none."""
        is_decided = self.verdict is not None or all(graph.remembered is not None for graph in self._all_graphs)
        return self._is_closed or (is_decided and self._procedure is None and not self._latecomers())

    def skips(self, graph: TunableGraph) -> bool:
        """Return whether this call of a graph is not watched; the caller then calls neither `enter` nor `leave`."""
        remaining = self._num_unwatched
        if remaining <= 0:
            return False
        graphs = self._all_graphs
        if graph is graphs[0] and (self._last is not graph or len(graphs) == 1 or not self._is_unrolled(graph)):
            if remaining <= 1:
                self._num_unwatched = 0
                return False
            self._num_unwatched = remaining - 1
        self._last = graph
        return True

    def enter(self, graph: TunableGraph) -> None:
        """Call this before a graph runs; at the beginning of a step, it sets the variant of every graph.

        Raises:
            RankError: this rank cannot run what the other ranks run, so it stops.
            Exception: a variant could not be prepared; all graphs run their plans from now on.
            KeyboardInterrupt: this, or any other `BaseException`: the comparison restarts with the next step.
        """
        caller = threading.get_ident()
        self._callers.add(caller)
        if len(self._callers) > 1:
            self._watch.spoil()
        if graph is not self._all_graphs[0] or not self._lock.acquire(blocking=False):
            return  # not the beginning of a step, or another thread is here
        try:
            self._ranks.check()
            if not self._is_closed and not self._is_unrolled(graph):
                self._begin_step()
        except BaseException as error:
            self._callers.discard(caller)
            self._is_closed = isinstance(error, Exception) or not self._ranks.is_alone  # the other ranks do not restart
            self._abandon()
            if self._ranks.is_alone or isinstance(error, RankError) or not isinstance(error, Exception):
                raise
            raise self._ranks.fail(f"autotuning failed here: {type(error).__name__}: {error}") from error
        finally:
            self._lock.release()

    def leave(self, graph: TunableGraph, ns: int | None) -> None:
        """Call this after a graph ran, with its nanoseconds; None if it raised."""
        self._callers.discard(threading.get_ident())
        if ns is None or not self._lock.acquire(blocking=False):
            return  # calls overlap with another thread's: neither time counts
        try:
            self._last = graph
            if self._comparison is not None:
                for index, other in enumerate(self._graphs):
                    if other is graph:
                        self._comparison.record(index, ns)
            elif self._watch.is_in_step:
                self._watch.record(graph, ns)
        finally:
            self._lock.release()

    def _is_unrolled(self, graph: TunableGraph) -> bool:
        """Whether the graph repeats within a step: several forwards, then their backwards."""
        return self._last is graph and any(other.has_run for other in self._all_graphs[1:])

    def _abandon(self) -> None:
        """Run plans, or, if the comparison was only interrupted, the selection of the verdict before it."""
        self._procedure = self._comparison = None
        decided = () if self._is_closed or self.verdict is None else self.verdict.selection
        variants = itertools.chain(decided, itertools.repeat(Variant.PLAN))
        for graph, variant in zip(self._all_graphs, variants, strict=False):
            graph.use(nearest(graph, variant))

    def _begin_step(self) -> None:
        if self._procedure is None:
            if not self._is_called_for():
                return
            self._procedure = self._new_procedure()
            self._graphs, self._comparisons = self._procedure.graphs, self._procedure.run()
        if self._comparison is None:
            self._advance()
        while self._comparison is not None:
            selection = self._comparison.begin_step()
            if selection is not None:
                if self._comparison.is_in_first_step:
                    self._trim_memory()
                self._procedure.use(selection)
                for graph, *variants in zip(self._graphs, *self._comparison.remaining_selections, strict=True):
                    graph.keep(variants)
                return
            self._advance()

    def _is_called_for(self) -> bool:
        """Whether a comparison should begin; a verdict of an earlier process is adopted instead."""
        if self.verdict is None or self.verdict.is_remembered:
            if not self._is_ready():
                return False
            remembered = [graph.remembered for graph in self._all_graphs if graph.has_run]
            if None in remembered:
                return True
            if self.verdict != remembered[0]:
                self.verdict = remembered[0]
                self._trim_memory()
        if latecomers := self._latecomers():
            for graph in latecomers:
                if not graph.is_settled:
                    graph.use(Variant.PLAN)  # only a plan that runs can learn, even a serial one
            return self._is_ready()
        if not self._is_watched:
            self._num_unwatched = math.inf
            return False
        if not self._watch.is_in_step:
            self._watch.begin_step(is_spoilt=len(self._callers) > 1)
            return False
        if self._watch.has_drifted([graph for graph in self._all_graphs if graph.has_run]) or self._is_inductor_due():
            return True
        self._num_unwatched = WATCH_EVERY - 1
        return False

    def _is_inductor_due(self) -> bool:
        """Whether Inductor was never compared, and the loop has run long enough for its compile to pay off."""
        if self.verdict is None or self.verdict.has_compared(Variant.INDUCTOR):
            return False
        prepare_ns = sum(graph.prepare_ns for graph in self._all_graphs if graph.has_run)
        return 0 < prepare_ns <= self._compile_share * self._watch.total_ns

    def _latecomers(self) -> Sequence[TunableGraph]:
        """Return the graphs that first ran after the verdict of this process, which does not cover them."""
        if self.verdict is None or self.verdict.is_remembered or not self._ranks.is_alone:
            return ()
        return [g for place, g in enumerate(self._all_graphs) if g.has_run and place not in self._compared]

    def _is_ready(self) -> bool:
        """Whether the plan of every graph that has run is final."""
        return self._all_graphs[0].has_run and all(g.is_settled or not g.has_run for g in self._all_graphs)

    def _new_procedure(self) -> Procedure:
        last = self.verdict
        known = Known(
            verdict=last,
            is_first=last is None or last.is_remembered or indices_of_running(self._all_graphs) != self._compared,
            is_inductor_due=self._is_inductor_due() or not self._is_watched,
        )
        return Procedure(self._all_graphs, known, self._agreement, self._trim_memory)

    def _advance(self) -> None:
        """Go to the next comparison, or to the end."""
        assert self._procedure is not None
        self._comparison = None
        try:
            self._comparison = next(self._comparisons)
        except StopIteration as end:
            verdict: Verdict = end.value
            procedure, self._procedure = self._procedure, None
            self._watch.restart(is_confirmed=self.verdict is not None and self.verdict.selection == verdict.selection)
            self._compared = procedure.compared
            procedure.use(verdict.selection)
            self.verdict = replace(verdict, selection=tuple(graph.adopt_variant() for graph in self._graphs))
            self._tell(self.verdict)


def _no_comparisons() -> Generator[Comparison | None, None, Verdict]:
    raise AssertionError("nothing is being decided")
    yield
