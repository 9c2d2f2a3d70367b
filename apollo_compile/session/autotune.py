"""Stage 9: which variant each graph of a model runs, decided by measuring in the user's own steps.

    [graphs of one model, each with its variants] -> Verdict

A plan rests on predictions, and a user switches to us only if the worst case is what they had. So the variants of a
model are compared: its segments one after the other, its plan, the plan of the best list schedule, and the whole graphs
as Inductor compiles them; on a GPU also the plan's order on streams without quotas, on streams of different priorities,
and on lanes that overlap. `comparison.py` says how two are compared, `procedure.py` in which order, `drift.py` when a
verdict is looked at again. Here is when that happens:

Steps       A step begins when the first graph runs and the graph before it was another: forwards in a row belong to one
            step. What the graphs run only ever changes between steps.
Memory      Before a turn, and before Inductor compiles, free memory goes back to the system: what one variant left
            behind is in pieces of other sizes than the next one needs, so the variants would add up. A turn's first
            step, which is not timed, gets its own again. While several models compete, none does so, for it would fall
            into another's timed steps.
Drift       The winner's steps stay watched. If they take longer or shorter than they did, what is compiled is compared
            again; if Inductor never had to compile, as a plan was ahead by `CLEAR`, that is weighed anew.
Latecomers  A graph that runs for the first time after the verdict, as the backward of a model that was evaluated before
            it was trained, learns its plan; then all is compared again, with Inductor. Not with several ranks.
Earlier     Where an earlier process came to a verdict about every graph that runs (`store/history.py`), that one holds,
            and is watched as one of this process. After a drift Inductor may compile, as in a first comparison.
Ranks       With several ranks drift is not watched, so that a verdict is final.

Guarantees: if anything fails, all graphs run their plans and nothing is compared any more, or, with several ranks, of
which the others go on with it, the step raises a `RankError`. Whoever interrupts it, as one may while Inductor
compiles, has it begin again with the next step; with several ranks, plans run from then on.
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
    COMPILE_SHARE,
    ComparisonAgreement,
    Known,
    Procedure,
    TunableGraph,
    nearest,
    places_of_running,
)

_tuners: weakref.WeakSet[Autotuner] = weakref.WeakSet()
"""Those of this process."""


class Autotuner:
    """Decides about the graphs of one model, and watches the winner afterwards.

    Arguments:
        graphs: the graphs of the model whose variant is not decided yet; the one that a step runs first comes first.
            The list may grow until the first comparison.
        tell: called with every verdict.
        ranks: who must come to the same verdict.
        trim_memory: gives free memory back to the system; called before every turn, before Inductor compiles, and when
            an earlier verdict is adopted.
        is_watched: whether drift is looked for afterwards; calls that take as long as their sizes make them drift.
    """

    def __init__(
        self,
        graphs: Sequence[TunableGraph],
        tell: Callable[[Verdict], None],
        ranks: Ranks | None = None,
        *,
        trim_memory: Callable[[], None] = lambda: None,
        is_watched: bool = True,
    ) -> None:
        self.verdict: Verdict | None = None
        self._all_graphs = graphs
        self._graphs: tuple[TunableGraph, ...] = ()
        """Those that take part in the latest decision."""
        self._compared: frozenset[int] = frozenset()
        """Those of all graphs that had run when it began, by their place."""
        self._tell = tell
        self._ranks = ranks or Ranks(None)
        self._release_free_memory = trim_memory
        _tuners.add(self)
        self._is_watched = is_watched and self._ranks.is_alone
        self._agreement = ComparisonAgreement(self._ranks)
        self._comparison: Comparison | None = None
        self._procedure: Procedure | None = None
        self._comparisons: Generator[Comparison | None, None, Verdict] = _none_is_held()
        self._watch = DriftWatch()
        self._num_unwatched: float = 0
        """Steps until one begins that is looked at, that one included; until then they cost nothing."""
        self._callers: set[int] = set()
        """Threads that are between `enter` and `leave`."""
        self._last: TunableGraph | None = None
        """The graph that ran last."""
        self._is_closed = False
        self._lock = threading.Lock()

    def _trim_memory(self) -> None:
        """Give back free memory, unless that falls into timed steps of another model."""
        if not any(other.is_comparing for other in _tuners if other is not self):
            self._release_free_memory()

    @property
    def is_watched(self) -> bool:
        """Whether drift is looked for after the verdict."""
        return self._is_watched

    @property
    def is_comparing(self) -> bool:
        """Whether a comparison is being held."""
        return self._procedure is not None

    @property
    def progress(self) -> str:
        """Say where the comparison is that is being held, or will be."""
        comparison = self._comparison
        return f"a comparison begins, of at least {MIN_ROUNDS} rounds" if comparison is None else comparison.progress

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being decided: there is a verdict, or there will be none."""
        is_decided = self.verdict is not None or all(graph.remembered is not None for graph in self._all_graphs)
        return self._is_closed or (is_decided and self._procedure is None and not self._latecomers())

    def skips(self, graph: TunableGraph) -> bool:
        """Return whether this call of a graph goes by unwatched: then neither `enter` nor `leave` is to be called."""
        left = self._num_unwatched
        if left <= 0:
            return False
        graphs = self._all_graphs
        if graph is graphs[0] and (self._last is not graph or len(graphs) == 1 or not self._is_unrolled(graph)):
            if left <= 1:
                self._num_unwatched = 0
                return False
            self._num_unwatched = left - 1
        self._last = graph
        return True

    def enter(self, graph: TunableGraph) -> None:
        """Call this before a graph runs; if a step begins with it, the variant of every graph is set for the step.

        Raises:
            RankError: with several ranks, this one cannot do as the others; it does not run on.
            Exception: a variant could not be made ready; all graphs run their plans from now on.
            KeyboardInterrupt: as others that are no `Exception`; the comparison begins anew with the next step.
        """
        caller = threading.get_ident()
        self._callers.add(caller)
        if len(self._callers) > 1:
            self._watch.spoil()
        if graph is not self._all_graphs[0] or not self._lock.acquire(blocking=False):
            return  # in the midst of a step, or in another thread's
        try:
            self._ranks.check()
            if not self._is_closed and not self._is_unrolled(graph):
                self._begin_step()
        except BaseException as error:
            self._callers.discard(caller)
            self._is_closed = isinstance(error, Exception) or not self._ranks.is_alone  # others do not begin anew
            self._abandon()
            if self._ranks.is_alone or isinstance(error, RankError) or not isinstance(error, Exception):
                raise
            raise self._ranks.fail(f"autotuning failed here: {type(error).__name__}: {error}") from error
        finally:
            self._lock.release()

    def leave(self, graph: TunableGraph, ns: int | None) -> None:
        """Call this after a graph ran, with how long it took; None if it raised."""
        self._callers.discard(threading.get_ident())
        if ns is None or not self._lock.acquire(blocking=False):
            return  # another thread is at it: its time and this one are worth nothing
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
        """Whether the graph runs again before the others of its step did: several forwards, then their backwards."""
        return self._last is graph and any(other.has_run for other in self._all_graphs[1:])

    def _abandon(self) -> None:
        """Run plans, or, if the comparison was only interrupted, what was decided before it."""
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
        """Whether there is something to decide; if an earlier process did, its verdict is this one's."""
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
                    graph.use(Variant.PLAN)  # only so it can learn; even one that is to run in turn
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
        """Whether Inductor never competed, and the loop has run for so long that its compile can pay."""
        if self.verdict is None or self.verdict.has_met(Variant.INDUCTOR):
            return False
        prepare_ns = sum(graph.prepare_ns for graph in self._all_graphs if graph.has_run)
        return 0 < prepare_ns <= COMPILE_SHARE * self._watch.total_ns

    def _latecomers(self) -> Sequence[TunableGraph]:
        """Return the graphs that the verdict of this process is not about, as they ran for the first time after it."""
        if self.verdict is None or self.verdict.is_remembered or not self._ranks.is_alone:
            return ()
        return [g for place, g in enumerate(self._all_graphs) if g.has_run and place not in self._compared]

    def _is_ready(self) -> bool:
        """Whether every plan is final, apart from those of graphs that the user does not run."""
        return self._all_graphs[0].has_run and all(g.is_settled or not g.has_run for g in self._all_graphs)

    def _new_procedure(self) -> Procedure:
        last = self.verdict
        known = Known(
            verdict=last,
            is_first=last is None or last.is_remembered or places_of_running(self._all_graphs) != self._compared,
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


def _none_is_held() -> Generator[Comparison | None, None, Verdict]:
    raise AssertionError("nothing is being decided")
    yield
