"""Stage 9: which way of running a model stays, decided by measuring it in the user's own steps.

    [graphs of one model, each with its ways] -> Verdict

A plan rests on predictions, and a user switches to us only if the worst case is what they had. So the ways of running
a model compete: its segments one after the other, its plan, the plan of the best list schedule, and the whole graphs as
Inductor compiles them; on a GPU also the plan's order on streams without quotas, on streams of different priorities,
and on lanes that overlap. Nothing runs twice for it: a step of the training loop, forward and backward, belongs to one
entrant, the next steps to another.

Contest     Entrants take turns of `STEPS_PER_TURN` steps; the first of a turn is not timed, since it brings the
            entrant's code and data back into the caches. Where steps are short, noise is long, so after the first round
            a turn is as many steps, up to `MAX_STEPS_PER_TURN`, as take `TURN_NS` without the first. A round is one
            turn of each, every other round in reverse, so that drift of the machine falls on all. An entrant's time in
            a round is the sum over the graphs of the median of its timed calls: forward and backward are judged
            together. What counts between two entrants is the ratio of their times in the same round, since a disturbed
            round disturbs both. A step begins when the first graph runs and the graph before it was another: forwards
            in a row belong to one step.
Memory      Before a turn, and before Inductor compiles, free memory goes back to the system: what one way left behind
            is in pieces of other sizes than the next one needs, so the ways would add up. A turn's first step, which is
            not timed, gets its own again. While several models compete, none does so, for it would fall into another's
            timed steps.
End         After `MIN_ROUNDS`, an entrant leaves that has lost to the leader (least median ratio) by more than `TIE`,
            in every round but one in eight: a one-sided sign test at about 5 %. Its device memory goes at once. The
            contest ends when one is left, or after `MAX_ROUNDS`. The winner is the first entrant, in the order given
            (simplest first), whose median ratio to the leader is within `TIE`: a more complicated way has to be worth
            it. It need not be sure: to take the wrong one of two equals costs nothing, and where times vary by a fifth,
            a rule that asks for three wins in four misses more than half of the plans that are a tenth faster.
Procedure   1. The plan against its segments in turn, and against the list schedule where that is predicted to be about
               as fast. They are the same code, so this needs no compiling.
            2. Inductor compiles the whole graphs and meets the winner. Where a plan is ahead by `CLEAR`, Inductor's
               version would have to beat its own pieces by that much, so the compile waits until it can pay: until the
               training loop has run for so long that the compile takes no more than `COMPILE_SHARE` of that time.
            3. If another way was faster for one of the graphs alone, the mixture meets the winner; not on a GPU, where
               all graphs of a model run the same way.
            A verdict takes `MIN_ROUNDS` comparable rounds: with fewer, what was to be beaten stays, at first the plan.
Drift       One in `WATCH_EVERY` of the winner's steps stays watched, and the others cost nothing. Which one is decided
            when a step begins and holds for all its graphs: a sample is a whole step, the sum over the graphs of their
            mean call, so that it does not depend on how many forwards come before their backwards, or how often the
            model is evaluated between two steps. A step in which not all graphs ran that have run before, or in which
            calls of several threads overlapped, is no sample. If the medians of `DRIFT_STEPS` samples are off by
            `DRIFT` from the first such median twice in a row, what is compiled competes again; if Inductor never had
            to, as a plan was ahead by `CLEAR`, step 2 counts anew. Each time that changes nothing, the next contest is
            at least twice as far away.
Latecomers  A graph that runs for the first time after the verdict, as the backward of a model that was evaluated before
            it was trained, learns its plan; then the contest is held again, with Inductor. Not with several ranks.
Earlier     Where an earlier process came to a verdict about every graph that runs (`history.py`), that one holds, and
            is watched as one of this process. After a drift Inductor's way may be compiled, as in a first contest.

Ranks       With several ranks, the entrants of a contest are those of the first rank to begin it, and the times of a
            round those of the first rank to end it, on all ranks. All else follows from them and from the number of
            steps, so all ranks run the same entrant in the same step and end with the same verdict: Note [What ranks
            agree on] in `ranks.py`. Inductor competes whatever the lead, if it compiles every graph on every rank: a
            rank where it does not says so at once, and the others begin the contest one step after they compiled.
            Drift is not watched then, so that a verdict is final.

Guarantees: the choice only ever changes between steps; a round counts only if all entrants ran the same graphs in it,
and all that the model ran before; if anything fails, all graphs run their plans and the contest is closed, or, with
several ranks, of which the others go on with it, the step raises a `RankError`. Whoever interrupts it, as one may while
Inductor compiles, has it held again from the next step on; with several ranks, plans run from then on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import RankError
from apollo_compile.ir import Choice, Standing, Variant, Verdict
from apollo_compile.json_form import from_json, to_json

STEPS_PER_TURN = 3
MAX_STEPS_PER_TURN = 33
TURN_NS = 10_000_000
MIN_ROUNDS = 5
MAX_ROUNDS = 12
TIE = 0.01
CLEAR = 1.20
COMPILE_SHARE = 0.05
"""Of the time that the training loop has run, what Inductor's compile may take where a plan is clearly ahead."""
WATCH_EVERY = 8
DRIFT_STEPS = 8
DRIFT = 0.15
ALLOWED_WINS = 8
"""A loser may have won one round in so many."""

MIXTURE = "best of each graph"
SHARED_WAYS = (Variant.STREAMS, Variant.PRIORITIES, Variant.OVERLAPPING)
"""Ways that run the plan on lanes which share units, the simplest first."""


class Graph(Protocol):
    """One graph of the model, as the contest sees it."""

    @property
    def ways(self) -> Sequence[Variant]:
        """Ways that it can run now, among `SERIAL`, `LISTED`, `PLAN` and `INDUCTOR`; on a GPU, `SHARED_WAYS` too."""

    @property
    def is_bound(self) -> bool:
        """Whether all graphs of its model have to run the same way, `INDUCTOR` too.

        So it is on a GPU, where a backward replays on what its forward left in the memory of a CUDA graph, which every
        way has of its own. A graph that is bound can run every way, whether that is one of its own or not.
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

    def adopt_way(self) -> Variant:
        """Make the list schedule, if that is how it runs, its plan; return how it runs. The contest is over."""

    def keep(self, variants: Collection[Variant]) -> None:
        """Let go of the device memory that all other ways keep for their next step; they can still be used."""


Round = Mapping[str, Mapping[int, float]]
"""Per entrant and graph, the median nanoseconds of its calls."""


class Contest:
    """Entrants take turns until one is left; see the top of this file for the rules.

    Arguments:
        entrants: what every one of them runs, by name; the simplest first, which wins ties.
        required: graphs that a turn must have timed for its round to count.
        settle: returns the round that counts, given the one that was measured here.
    """

    def __init__(
        self,
        entrants: Mapping[str, Choice],
        required: Collection[int] = (0,),
        settle: Callable[[Round], Round] = lambda measured: measured,
    ) -> None:
        self.entrants = dict(entrants)
        self.num_steps = 0
        self._required = frozenset(required)
        self._settle = settle
        self._alive = list(entrants)
        self._order = list(entrants)
        self._turn = 0
        self._steps_per_turn = STEPS_PER_TURN
        self._steps_in_turn = 0
        self._samples: dict[int, list[int]] = defaultdict(list)
        self._round: dict[str, dict[int, float]] = {}
        self._rounds: list[Round] = []
        self._num_rounds = 0

    @property
    def num_rounds(self) -> int:
        """Rounds that count."""
        return len(self._rounds)

    @property
    def progress(self) -> str:
        """Say which round it is in."""
        number = self._num_rounds + 1
        limit = f"at least {MIN_ROUNDS}" if number <= MIN_ROUNDS else f"at most {MAX_ROUNDS}"
        return f"round {number} of {limit} between {', '.join(self._alive)}"

    @property
    def is_over(self) -> bool:
        """Whether the winner is known."""
        return len(self._alive) == 1 or self._num_rounds >= MAX_ROUNDS

    @property
    def choices_left(self) -> Sequence[Choice]:
        """What the entrants run that may still win."""
        return [self.entrants[name] for name in self._alive]

    def begin_step(self) -> Choice | None:
        """Return what the step that begins now runs, or None if the contest is over."""
        if self._steps_in_turn == self._steps_per_turn:
            self._end_turn()
        if self.is_over:
            return None
        self._steps_in_turn += 1
        self.num_steps += 1
        return self.entrants[self._order[self._turn]]

    @property
    def is_in_first_step(self) -> bool:
        """Whether the step that goes on is the first of a turn."""
        return self._steps_in_turn == 1

    def record(self, graph: int, ns: int) -> None:
        """Note the duration of one call in the step that is going on."""
        if self._steps_in_turn > 1:
            self._samples[graph].append(ns)

    def winner(self) -> str:
        """Return the first entrant that is as fast as the leader, ties included."""
        leader = self._leader()
        return next(name for name in self._alive if self.ratio(name, leader) <= 1 + TIE)

    def ratio(self, name: str, other: str, graph: int | None = None) -> float:
        """Return the median over rounds of the time of `name` over that of `other`; of one graph or of all."""
        ratios = self._ratios(name, other, graph)
        return statistics.median(ratios) if ratios else 1.0

    def standing(self, name: str, winner: str) -> Standing:
        """Return how an entrant did."""
        times = [sum(result[name].values()) for result in self._rounds if name in result]
        return Standing(
            name=name,
            step_ns=statistics.median(times) if times else 0.0,
            ratio=self.ratio(name, winner),
            num_rounds=len(times),
        )

    def is_faster(self, name: str, other: str) -> bool:
        """Return whether `name` beats `other` by more than a tie, in nearly every round."""
        ratios = self._ratios(name, other, None)
        if len(ratios) < MIN_ROUNDS or statistics.median(ratios) * (1 + TIE) >= 1:
            return False
        return sum(ratio >= 1 for ratio in ratios) <= len(ratios) // ALLOWED_WINS

    def _ratios(self, name: str, other: str, graph: int | None) -> list[float]:
        def time(result: Mapping[int, float]) -> float:
            return sum(result.values()) if graph is None else result.get(graph, 0.0)

        both = [result for result in self._rounds if name in result and other in result]
        return [time(r[name]) / time(r[other]) for r in both if time(r[other]) > 0]

    def _leader(self) -> str:
        first = self._alive[0]
        return min(self._alive, key=lambda name: self.ratio(name, first))

    def _end_turn(self) -> None:
        name = self._order[self._turn]
        self._round[name] = {graph: statistics.median(samples) for graph, samples in self._samples.items()}
        self._samples.clear()
        self._steps_in_turn = 0
        self._turn += 1
        if self._turn < len(self._order):
            return
        measured = self._settle(self._round)
        first, *others = (set(times) for times in measured.values())
        if measured.keys() == self._round.keys() and first >= self._required and all(o == first for o in others):
            self._rounds.append(measured)
            self._steps_per_turn = _steps_per_turn(min(sum(times.values()) for times in measured.values()))
        self._num_rounds += 1
        self._round = {}
        self._turn = 0
        leader = self._leader()
        self._alive = [name for name in self._alive if not self.is_faster(leader, name)]
        self._order = self._alive[:: 1 if self._num_rounds % 2 == 0 else -1]


_selections: weakref.WeakSet[Selection] = weakref.WeakSet()
"""Those of this process."""


class Selection:
    """Holds the contests of one model, and watches the winner afterwards.

    Arguments:
        graphs: the graphs of the model whose way is not decided yet; the one that a step runs first comes first. The
            list may grow until the first contest.
        tell: called with every verdict.
        ranks: who must come to the same verdict.
        tidy: called before every turn, before Inductor compiles, and where an earlier verdict begins to count: what is
            free then is of no use to what follows.
        is_watched: whether drift is looked for afterwards; calls that take as long as their sizes make them drift.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        tell: Callable[[Verdict], None],
        ranks: Ranks | None = None,
        *,
        tidy: Callable[[], None] = lambda: None,
        is_watched: bool = True,
    ) -> None:
        self.verdict: Verdict | None = None
        self._all_graphs = graphs
        self._graphs: tuple[Graph, ...] = ()
        """Those that take part in the latest contest."""
        self._compared: frozenset[int] = frozenset()
        """Those of all graphs that had run when it began, by their place."""
        self._tell = tell
        self._ranks = ranks or Ranks(None)
        self._give_back = tidy
        _selections.add(self)
        self._is_watched = is_watched and self._ranks.is_alone
        self._num_rounds, self._num_fields = itertools.count(), itertools.count()
        self._contest: Contest | None = None
        self._procedure: Generator[Contest | None, None, Verdict] | None = None
        self._watch = _Watch()
        self._num_unwatched: float = 0
        """Steps until one begins that is looked at, that one included; until then they cost nothing."""
        self._callers: set[int] = set()
        """Threads that are between `enter` and `leave`."""
        self._last: Graph | None = None
        """The graph that ran last."""
        self._prepared_ns = 0
        """How long Inductor compiled for the latest contest."""
        self._is_closed = False
        self._lock = threading.Lock()

    def _tidy(self) -> None:
        """Give back free memory, unless that falls into timed steps of another model."""
        if not any(other.is_contending for other in _selections if other is not self):
            self._give_back()

    @property
    def is_watched(self) -> bool:
        """Whether drift is looked for after the verdict."""
        return self._is_watched

    @property
    def is_contending(self) -> bool:
        """Whether a contest is being held."""
        return self._procedure is not None

    @property
    def progress(self) -> str:
        """Say where the contest is that is being held, or will be."""
        contest = self._contest
        return f"a contest begins, of at least {MIN_ROUNDS} rounds" if contest is None else contest.progress

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being decided: there is a verdict, or there will be none."""
        is_decided = self.verdict is not None or all(graph.remembered is not None for graph in self._all_graphs)
        return self._is_closed or (is_decided and self._procedure is None and not self._latecomers())

    def passes(self, graph: Graph) -> bool:
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

    def enter(self, graph: Graph) -> None:
        """Call this before a graph runs; if a step begins with it, the way of every graph is set for the step.

        Raises:
            RankError: with several ranks, this one cannot do as the others; it does not run on.
            Exception: a way could not be made ready; all graphs run their plans from now on.
            KeyboardInterrupt: as others that are no `Exception`; the contest begins anew with the next step.
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
            raise self._ranks.fail(f"a contest failed here: {type(error).__name__}: {error}") from error
        finally:
            self._lock.release()

    def leave(self, graph: Graph, ns: int | None) -> None:
        """Call this after a graph ran, with how long it took; None if it raised."""
        self._callers.discard(threading.get_ident())
        if ns is None or not self._lock.acquire(blocking=False):
            return  # another thread is at it: its time and this one are worth nothing
        try:
            self._last = graph
            if self._contest is not None:
                for index, other in enumerate(self._graphs):
                    if other is graph:
                        self._contest.record(index, ns)
            elif self._watch.is_in_step:
                self._watch.record(graph, ns)
        finally:
            self._lock.release()

    def _is_unrolled(self, graph: Graph) -> bool:
        """Whether the graph runs again before the others of its step did: several forwards, then their backwards."""
        return self._last is graph and any(other.has_run for other in self._all_graphs[1:])

    def _abandon(self) -> None:
        """Run plans, or, if the contest was only interrupted, what was decided before it."""
        self._procedure = self._contest = None
        decided = () if self._is_closed or self.verdict is None else self.verdict.choice
        for graph, way in zip(self._all_graphs, itertools.chain(decided, itertools.repeat(Variant.PLAN)), strict=False):
            graph.use(_nearest(graph, way))

    def _begin_step(self) -> None:
        if self._procedure is None:
            if not self._is_called_for():
                return
            self._graphs = tuple(self._all_graphs)
            self._procedure = self._decide()
        if self._contest is None:
            self._advance()
        while self._contest is not None:
            choice = self._contest.begin_step()
            if choice is not None:
                if self._contest.is_in_first_step:
                    self._tidy()
                self._use(choice)
                for graph, *ways in zip(self._graphs, *self._contest.choices_left, strict=True):
                    graph.keep(ways)
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
                self._tidy()
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

    def _latecomers(self) -> Sequence[Graph]:
        """Return the graphs that the verdict of this process is not about, as they ran for the first time after it."""
        if self.verdict is None or self.verdict.is_remembered or not self._ranks.is_alone:
            return ()
        return [g for place, g in enumerate(self._all_graphs) if g.has_run and place not in self._compared]

    def _is_ready(self) -> bool:
        """Whether every plan is final, apart from those of graphs that the user does not run."""
        return self._all_graphs[0].has_run and all(g.is_settled or not g.has_run for g in self._all_graphs)

    def _advance(self) -> None:
        """Go to the next contest, or to the end."""
        assert self._procedure is not None
        self._contest = None
        try:
            self._contest = next(self._procedure)
        except StopIteration as end:
            verdict: Verdict = end.value
            self._watch.restart(is_confirmed=self.verdict is not None and self.verdict.choice == verdict.choice)
            self._use(verdict.choice)
            verdict = replace(verdict, choice=tuple(graph.adopt_way() for graph in self._graphs))
            self._procedure, self.verdict = None, verdict
            self._tell(verdict)

    def _decide(self) -> Generator[Contest | None, None, Verdict]:
        """Hold one contest after the other.

        Each yield is a contest that is over when the generator goes on, or None for one step in which none is held.
        """
        running: Sequence[Graph] = [graph for graph in self._graphs if graph.has_run]
        last = self.verdict
        is_first = last is None or last.is_remembered or self._places(running) != self._compared
        is_inductor_known = not is_first and last is not None and last.has_met(Variant.INDUCTOR)
        is_inductor_due = self._is_inductor_due() or not self._is_watched
        self._prepared_ns = 0
        if is_first and any(Variant.INDUCTOR in graph.ways for graph in running):
            self._prepare(running)  # of the others it is known what Inductor makes of them
        entrants, running = self._agree(
            self._entrants((Variant.INDUCTOR, Variant.SERIAL, *SHARED_WAYS, Variant.LISTED, Variant.PLAN)), running
        )
        results = _Results(sorted(self._places(running)), self._settle)
        stays = next((name for name, each in entrants.items() if last and each == last.choice), list(entrants)[-1])
        winner = yield from results.hold(entrants, stays)
        is_clear = winner in (Variant.LISTED, Variant.PLAN) and results.ratios.get(Variant.SERIAL, 1.0) >= CLEAR
        if not is_inductor_known and Variant.INDUCTOR not in entrants and (is_inductor_due or not is_clear):
            self._prepare(running)
            rivals = yield from self._meet_inductor(winner, entrants[winner], running)
            if len(rivals) > 1:
                winner = yield from results.hold(rivals, winner)
        mixture = None if any(graph.is_bound for graph in self._graphs) else results.mixture(winner)
        if mixture is not None:
            winner = yield from results.hold({winner: results.choices[winner], MIXTURE: mixture}, winner)
        self._compared = self._places(running)
        return results.verdict(winner, prepare_ns=self._prepared_ns)

    def _prepare(self, graphs: Iterable[Graph]) -> None:
        self._tidy()
        begin = time.perf_counter_ns()
        for graph in graphs:
            graph.prepare()
        self._prepared_ns += time.perf_counter_ns() - begin

    def _meet_inductor(
        self, winner: str, choice: Choice, running: Sequence[Graph]
    ) -> Generator[None, None, Mapping[str, Choice]]:
        """Return who competes after Inductor compiled: `winner` alone if it could not, on whichever rank that was."""
        rivals: Mapping[str, Choice] = {**self._entrants((Variant.INDUCTOR,)), winner: choice}
        if self._ranks.is_alone:
            return rivals
        self._use(choice)
        if all(Variant.INDUCTOR in graph.ways for graph in running):
            yield None  # a step, in which a rank where that is not so can say it
            rivals, _ = self._agree(rivals, running)
        else:
            rivals, _ = self._agree({winner: choice}, running)
            yield None
        return rivals

    def _agree(
        self, entrants: Mapping[str, Choice], running: Sequence[Graph]
    ) -> tuple[Mapping[str, Choice], Sequence[Graph]]:
        """Return who competes on all ranks, and the graphs whose times count, given what this rank would take.

        Raises:
            RankError: one of them cannot be run here.
        """
        if self._ranks.is_alone:
            return entrants, running
        own = _Field(entrants=entrants, graphs=tuple(sorted(self._places(running))))
        topic = f"{self._topic}/contest {next(self._num_fields)}"
        field = from_json(_Field, json.loads(self._ranks.settle(topic, json.dumps(to_json(own)))))
        for name, choice in field.entrants.items():
            lacking = [way for graph, way in zip(self._graphs, choice, strict=True) if not _can_run(graph, way)]
            if lacking:
                raise self._ranks.fail(f"{name!r} competes on the other ranks, and this one cannot run '{lacking[0]}'")
        return field.entrants, [self._graphs[place] for place in field.graphs]

    def _settle(self, measured: Round) -> Round:
        """Return the times of a round that all ranks go by."""
        if self._ranks.is_alone:
            return measured
        topic = f"{self._topic}/round {next(self._num_rounds)}"
        settled = self._ranks.settle(topic, json.dumps({"times": to_json(measured)}))
        found = from_json(_Settled, json.loads(settled)).by_graph()
        if found.keys() != measured.keys():
            raise ValueError(f"{topic} is of {sorted(found)} on another rank, and of {sorted(measured)} on this one")
        return found

    @property
    def _topic(self) -> str:
        """Name of the graphs that compete among the ranks: where one of them could not be compiled, they are others."""
        return hashlib.sha256(" ".join(graph.topic for graph in self._graphs).encode()).hexdigest()

    def _places(self, graphs: Iterable[Graph]) -> frozenset[int]:
        """Return the places of some of the graphs."""
        return frozenset(place for place, graph in enumerate(self._graphs) if any(graph is each for each in graphs))

    def _entrants(self, names: Sequence[Variant]) -> dict[str, Choice]:
        """Return the distinct choices among the ways called `names`; the first name of a choice stays."""
        found: dict[Choice, str] = {}
        for name in names:
            has = [name in graph.ways for graph in self._graphs]
            is_refused = name == Variant.INDUCTOR and any(
                g.is_bound and g.has_run and name not in g.ways for g in self._graphs
            )
            if any(has) and not is_refused:
                found.setdefault(tuple(_nearest(graph, name) for graph in self._graphs), name)
        return {name: choice for choice, name in found.items()}

    def _use(self, choice: Choice) -> None:
        for graph, way in zip(self._graphs, choice, strict=True):
            graph.use(way)


def _steps_per_turn(step_ns: float) -> int:
    """Return how many steps a turn has, the one that is not timed included."""
    timed = math.ceil(TURN_NS / max(1.0, step_ns))
    return min(max(STEPS_PER_TURN, 1 + timed), MAX_STEPS_PER_TURN)


def _nearest(graph: Graph, name: Variant) -> Variant:
    """Return the way called `name`, or the simplest that the graph has: its plan may be to run in turn.

    Who has no list schedule of its own runs its plan, which may be that.
    """
    if graph.is_bound and (name != Variant.INDUCTOR or Variant.INDUCTOR in graph.ways):
        return name
    names = (
        (name, Variant.SERIAL, Variant.INDUCTOR, Variant.PLAN)
        if name != Variant.LISTED
        else (Variant.LISTED, Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR)
    )
    return next(way for way in names if way in graph.ways)


def _can_run(graph: Graph, way: Variant) -> bool:
    return way in graph.ways or (graph.is_bound and way != Variant.INDUCTOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    """Who competes, as it goes through the store."""

    entrants: Mapping[str, Choice]
    graphs: tuple[int, ...]
    """Places of those that have run: a round without one of them does not count."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """A round as it goes through the store."""

    times: Mapping[str, Mapping[str, float]]

    def by_graph(self) -> Round:
        """Return the round; keys of a JSON object are texts."""
        return {name: {int(graph): ns for graph, ns in times.items()} for name, times in self.times.items()}


class _Results:
    """What the contests of one decision have shown.

    Arguments:
        required: graphs that must have run for a round to count.
        settle: as for `Contest`.
    """

    def __init__(self, required: Sequence[int], settle: Callable[[Round], Round]) -> None:
        self.choices: dict[str, Choice] = {}
        self.ratios: dict[str, float] = {}
        """Of every entrant to the latest winner."""
        self._graph_ratios: dict[str, dict[int, float]] = {}
        """The same for one graph alone."""
        self._required = required
        self._settle = settle
        self._contests: list[Contest] = []
        self._standings: dict[str, Standing] = {}

    def hold(self, entrants: Mapping[str, Choice], stays: str) -> Generator[Contest, None, str]:
        """Hold a contest and return the winner: `stays`, an entrant, if too few rounds could be compared."""
        contest = Contest(entrants, self._required, self._settle)
        if not contest.is_over:
            yield contest
        winner = contest.winner() if contest.num_rounds >= MIN_ROUNDS else stays
        self.choices.update(entrants)
        self._contests.append(contest)
        known = next((name for name in entrants if name in self.ratios), winner)  # the winner before this contest
        scale = contest.ratio(known, winner)
        scales = {graph: contest.ratio(known, winner, graph) for graph in self._required}
        self.ratios = {name: ratio * scale for name, ratio in self.ratios.items()}
        for ratios in self._graph_ratios.values():
            ratios.update({graph: ratio * scales[graph] for graph, ratio in ratios.items()})
        for name in entrants:
            self._standings[name] = contest.standing(name, winner)
            self.ratios[name] = self._standings[name].ratio
            self._graph_ratios[name] = {graph: contest.ratio(name, winner, graph) for graph in self._required}
        return winner

    def mixture(self, winner: str) -> Choice | None:
        """Return the choice with the fastest way of every graph, if that is not the winner's.

        Ratios of different contests are chained, so this is a guess: the mixture has to beat the winner.
        """
        choice = list(self.choices[winner])
        for graph in self._required:
            best = min(self._graph_ratios, key=lambda name: self._graph_ratios[name][graph])
            if self._graph_ratios[best][graph] * (1 + TIE) < 1:
                choice[graph] = self.choices[best][graph]
        return None if tuple(choice) in self.choices.values() else tuple(choice)

    def verdict(self, winner: str, *, prepare_ns: int) -> Verdict:
        """Return the verdict, with everybody's ratio to the winner; Inductor took `prepare_ns` to compile for it."""
        standings = [replace(self._standings[name], ratio=ratio) for name, ratio in self.ratios.items()]
        return Verdict(
            winner=winner,
            choice=self.choices[winner],
            standings=tuple(sorted(standings, key=lambda s: (s.name != winner, s.ratio))),
            num_steps=sum(contest.num_steps for contest in self._contests),
            prepare_ns=prepare_ns,
        )


class _Watch:
    """Notices that the winner's steps take longer or shorter than they did."""

    def __init__(self) -> None:
        self.total_ns = 0
        """How long the loop has run with a verdict, about."""
        self._patience = 1
        self.restart(is_confirmed=False)

    def restart(self, *, is_confirmed: bool) -> None:
        """Begin anew after a verdict; be more patient if it was the one before."""
        self._patience = 2 * self._patience if is_confirmed else 1
        self._samples: list[float] = []
        self._calls: dict[int, list[int]] | None = None
        """Of the step that is watched, per graph: how many, and how long they took together."""
        self._is_spoilt = False
        self._steps = 0
        self._usual: float | None = None
        self._num_off = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a watched step has begun and was not ended."""
        return self._calls is not None

    def begin_step(self, *, is_spoilt: bool) -> None:
        """Watch the step that begins now; no sample is taken from one that is spoilt."""
        self._calls, self._is_spoilt = {}, is_spoilt

    def record(self, graph: Graph, ns: int) -> None:
        """Add a call to the step that is going on."""
        if self._calls is not None:
            counted = self._calls.setdefault(id(graph), [0, 0])
            counted[0] += 1
            counted[1] += ns

    def spoil(self) -> None:
        """Take no sample from the step that is going on."""
        self._is_spoilt = True

    def has_drifted(self, graphs: Iterable[Graph]) -> bool:
        """End a step, in which all of `graphs` should have run; return whether the contest should be held again."""
        calls, self._calls = self._calls or {}, None
        self.total_ns += WATCH_EVERY * sum(ns for _, ns in calls.values())
        if self._is_spoilt or calls.keys() != {id(graph) for graph in graphs}:
            return False
        self._samples.append(sum(ns / count for count, ns in calls.values()))
        self._steps += 1
        if len(self._samples) < DRIFT_STEPS:
            return False
        median = statistics.median(self._samples)
        self._samples.clear()
        if self._usual is None:
            self._usual = median
            return False
        self._num_off = self._num_off + 1 if abs(median / self._usual - 1) > DRIFT else 0
        return self._num_off >= 2 and self._steps >= 2 * DRIFT_STEPS * self._patience
