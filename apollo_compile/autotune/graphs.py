"""The tuner of a model whose graphs, a forward and a backward or several, are called one by one.

Steps       A step begins when the first graph runs after a different graph: consecutive forwards belong to one step.
            Graphs switch variants only between steps.
Plans       Comparisons begin when the plan of every graph that has run is final.
Latecomers  A graph that first runs after the verdict (the backward of a model that was evaluated before it was trained)
            finishes learning its plan; then everything is compared again.
Earlier     If an earlier process reached a verdict about every graph that runs, that verdict is adopted.

Guarantees: if anything fails, all graphs run their plans and comparisons end. An interrupt, as during a compile,
restarts the comparison with the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from apollo_compile.autotune.candidates import Candidate
from apollo_compile.autotune.tuner import Tuner
from apollo_compile.ir import Variant, Verdict


class TunableGraph(Protocol):
    """One graph of the model, as the tuner sees it."""

    @property
    def has_run(self) -> bool:
        """Whether the graph was ever called."""

    @property
    def is_settled(self) -> bool:
        """Whether its plan is final."""

    @property
    def remembered(self) -> Verdict | None:
        """The verdict of an earlier process, which it follows; None if there is none."""

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on, or the simplest one if it lacks it."""


class GraphTuner:
    """Selects the variant that all graphs of one model run.

    Arguments:
        graphs: the graphs of the model; the one that a step runs first comes first. The list may still grow.
        tuner: decides.
        make_candidates: returns the candidates, when the plans of all graphs that have run are final.
    """

    def __init__(
        self, graphs: Sequence[TunableGraph], tuner: Tuner, make_candidates: Callable[[], Sequence[Candidate]]
    ) -> None:
        self.tuner = tuner
        self.is_paused = False
        """Whether plans run without a comparison: the graphs are part of a training step, or a comparison failed."""
        self._graphs = graphs
        self._make_candidates = make_candidates
        self._compared: frozenset[int] = frozenset()
        """Indices of the graphs that had run when the comparison began."""
        self._callers: set[int] = set()
        """Threads that are between `enter` and `leave`."""
        self._last: TunableGraph | None = None
        """The graph that ran last."""
        self._lock = threading.Lock()

    @property
    def verdict(self) -> Verdict | None:
        """The latest verdict."""
        return self.tuner.verdict

    @property
    def is_settled(self) -> bool:
        """Whether autotuning is over: there is a verdict, or there will be none."""
        if self.is_paused:
            return True
        if not self._compared:
            return all(graph.remembered is not None for graph in self._graphs)
        return self._compared == _running(self._graphs) and self.tuner.is_settled

    @property
    def progress(self) -> str:
        """Times until now, while a comparison runs."""
        return self.tuner.progress if self._compared else ""

    @property
    def steps_left(self) -> int:
        """About how many steps comparisons still take, those to come included; 0 if there will be none."""
        if self.is_settled:
            return 0
        return self.tuner.steps_left if self._compared else self.tuner.expected_steps(self._make_candidates())

    @property
    def left_ns(self) -> int:
        """About how long they take; 0 if that is unknown."""
        return self.tuner.left_ns if self._compared else 0

    def resume(self) -> None:
        """Compare the variants of the graphs from the next step on."""
        self.is_paused = False

    def skips(self, graph: TunableGraph) -> bool:
        """Return whether this call of a graph is not watched; the caller then calls neither `enter` nor `leave`."""
        if self.is_paused:
            return True
        if self._begins_step(graph):
            if not self.tuner.skip_step():
                return False
        elif not self.tuner.is_skipping:
            return False
        self._last = graph
        return True

    def enter(self, graph: TunableGraph) -> None:
        """Call this before a graph runs; at the beginning of a step, it sets the variant of every graph.

        Raises:
            Exception: a variant could not be prepared; all graphs run their plans from now on.
            KeyboardInterrupt: this, or any other `BaseException`: the comparison restarts with the next step.
        """
        self._callers.add(threading.get_ident())
        if not self._begins_step(graph) or not self._lock.acquire(blocking=False):
            if len(self._callers) > 1:
                self.tuner.spoil()
            return  # within a step, or another thread is here
        try:
            self._begin_step()
            if len(self._callers) > 1:
                self.tuner.spoil()
        except BaseException as error:
            self._callers.discard(threading.get_ident())
            if isinstance(error, Exception):
                self.is_paused = True
                self.tuner.leave(Variant.PLAN)
            self._use(self.tuner.winner)
            raise
        finally:
            self._lock.release()

    def leave(self, graph: TunableGraph, ns: int | None) -> None:
        """Call this after a graph ran, with its nanoseconds; None if it raised."""
        self._callers.discard(threading.get_ident())
        if ns is None or not self._lock.acquire(blocking=False):
            return  # calls overlap with another thread's: neither time counts
        try:
            self._last = graph
            place = next((place for place, each in enumerate(self._graphs) if each is graph), None)
            if place is not None:
                self.tuner.record(ns, place)
        finally:
            self._lock.release()

    def _begins_step(self, graph: TunableGraph) -> bool:
        """Whether a call of this graph begins a step: it is the first, and not one of several forwards in a row."""
        if not self._graphs or graph is not self._graphs[0]:  # none are left of a model that was reverted
            return False
        return self._last is not graph or not any(other.has_run for other in self._graphs[1:])

    def _begin_step(self) -> None:
        running = _running(self._graphs)
        if running != self._compared:
            if not self._graphs[0].has_run or any(each.has_run and not each.is_settled for each in self._graphs):
                if self._compared:  # only a plan that runs can learn, even a serial one
                    self._use(Variant.PLAN)
                return
            self._compared = running
            remembered = [graph.remembered for graph in self._graphs if graph.has_run]
            earlier, candidates = remembered[0], self._make_candidates()
            if earlier is not None and None not in remembered:
                self.tuner.adopt(earlier, candidates, required=running)
            else:
                self.tuner.offer(candidates, incumbent=Variant.PLAN, required=running)
        self._use(self.tuner.begin_step())

    def _use(self, variant: Variant) -> None:
        for graph in self._graphs:
            graph.use(variant)


def _running(graphs: Sequence[TunableGraph]) -> frozenset[int]:
    """Return the indices of the graphs that were ever called."""
    return frozenset(place for place, graph in enumerate(graphs) if graph.has_run)
