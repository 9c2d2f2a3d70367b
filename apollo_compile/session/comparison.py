"""One comparison: selections of variants take turns in the user's own steps until one is left.

A selection is the variant that every graph of a model runs. Nothing runs twice for it: a step of the training loop,
forward and backward, belongs to one selection, the next steps to another.

Turns       Selections take turns of `STEPS_PER_TURN` steps; the first of a turn is not timed, since it brings the
            code and data of the selection back into the caches. Where steps are short, noise is long, so after the
            first round a turn is as many steps, up to `MAX_STEPS_PER_TURN`, as take `TURN_NS` without the first. A
            round is one turn of each, every other round in reverse, so that drift of the machine falls on all. The
            time of a selection in a round is the sum over the graphs of the median of its timed calls: forward and
            backward are judged together. What counts between two selections is the ratio of their times in the same
            round, since a disturbed round disturbs both.
End         After `MIN_ROUNDS`, a selection leaves that has lost to the leader (least median ratio) by more than `TIE`,
            in every round but one in eight: a one-sided sign test at about 5 %. The comparison ends when one is left,
            or after `MAX_ROUNDS`. The winner is the first selection, in the order given (simplest first), whose median
            ratio to the leader is within `TIE`: a more complicated variant has to be worth it. It need not be sure: to
            take the wrong one of two equals costs nothing, and where times vary by a fifth, a rule that asks for three
            wins in four misses more than half of the plans that are a tenth faster.

Guarantees: a round counts only if all selections ran the same graphs in it, and all that the model ran before.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace

from apollo_compile.ir import Selection, Standing, Verdict

STEPS_PER_TURN = 3
MAX_STEPS_PER_TURN = 33
TURN_NS = 10_000_000
MIN_ROUNDS = 5
MAX_ROUNDS = 12
TIE = 0.01
"""What two times may differ by, as a share, and be equal."""
ALLOWED_WINS = 8
"""A loser may have won one round in so many."""

Round = Mapping[str, Mapping[int, float]]
"""Per selection and graph, the median nanoseconds of its calls."""


class Comparison:
    """Entrants take turns until one is left; see the top of this file for the rules.

    Arguments:
        selections: what every one of them runs, by name; the simplest first, which wins ties.
        required: graphs that a turn must have timed for its round to count.
        settle: returns the round that counts, given the one that was measured here.
    """

    def __init__(
        self,
        selections: Mapping[str, Selection],
        required: Collection[int] = (0,),
        settle: Callable[[Round], Round] = lambda measured: measured,
    ) -> None:
        self.selections = dict(selections)
        self.num_steps = 0
        self._required = frozenset(required)
        self._settle = settle
        self._alive = list(selections)
        self._order = list(selections)
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
    def remaining_selections(self) -> Sequence[Selection]:
        """What the selections run that may still win."""
        return [self.selections[name] for name in self._alive]

    def begin_step(self) -> Selection | None:
        """Return what the step that begins now runs, or None if the comparison is over."""
        if self._steps_in_turn == self._steps_per_turn:
            self._end_turn()
        if self.is_over:
            return None
        self._steps_in_turn += 1
        self.num_steps += 1
        return self.selections[self._order[self._turn]]

    @property
    def is_in_first_step(self) -> bool:
        """Whether the step that goes on is the first of a turn."""
        return self._steps_in_turn == 1

    def record(self, graph: int, ns: int) -> None:
        """Note the duration of one call in the step that is going on."""
        if self._steps_in_turn > 1:
            self._samples[graph].append(ns)

    def winner(self) -> str:
        """Return the first selection that is as fast as the leader, ties included."""
        leader = self._leader()
        return next(name for name in self._alive if self.ratio(name, leader) <= 1 + TIE)

    def ratio(self, name: str, other: str, graph: int | None = None) -> float:
        """Return the median over rounds of the time of `name` over that of `other`; of one graph or of all."""
        ratios = self._ratios(name, other, graph)
        return statistics.median(ratios) if ratios else 1.0

    def standing(self, name: str, winner: str) -> Standing:
        """Return how an selection did."""
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


class Results:
    """What the comparisons of one decision have shown.

    Arguments:
        required: graphs that must have run for a round to count.
        settle: as for `Comparison`.
    """

    def __init__(self, required: Sequence[int], settle: Callable[[Round], Round]) -> None:
        self.selections: dict[str, Selection] = {}
        self.ratios: dict[str, float] = {}
        """Of every selection to the latest winner."""
        self._graph_ratios: dict[str, dict[int, float]] = {}
        """The same for one graph alone."""
        self._required = required
        self._settle = settle
        self._comparisons: list[Comparison] = []
        self._standings: dict[str, Standing] = {}

    def hold(self, selections: Mapping[str, Selection], incumbent: str) -> Generator[Comparison, None, str]:
        """Hold a comparison and return the winner: `incumbent`, an selection, if too few rounds could be compared."""
        comparison = Comparison(selections, self._required, self._settle)
        if not comparison.is_over:
            yield comparison
        winner = comparison.winner() if comparison.num_rounds >= MIN_ROUNDS else incumbent
        self.selections.update(selections)
        self._comparisons.append(comparison)
        known = next((name for name in selections if name in self.ratios), winner)  # the winner before this comparison
        scale = comparison.ratio(known, winner)
        scales = {graph: comparison.ratio(known, winner, graph) for graph in self._required}
        self.ratios = {name: ratio * scale for name, ratio in self.ratios.items()}
        for ratios in self._graph_ratios.values():
            ratios.update({graph: ratio * scales[graph] for graph, ratio in ratios.items()})
        for name in selections:
            self._standings[name] = comparison.standing(name, winner)
            self.ratios[name] = self._standings[name].ratio
            self._graph_ratios[name] = {graph: comparison.ratio(name, winner, graph) for graph in self._required}
        return winner

    def mixture(self, winner: str) -> Selection | None:
        """Return the selection with the fastest way of every graph, if that is not the winner's.

        Ratios of different comparisons are chained, so this is a guess: the mixture has to beat the winner.
        """
        selection = list(self.selections[winner])
        for graph in self._required:
            best = min(self._graph_ratios, key=lambda name: self._graph_ratios[name][graph])
            if self._graph_ratios[best][graph] * (1 + TIE) < 1:
                selection[graph] = self.selections[best][graph]
        return None if tuple(selection) in self.selections.values() else tuple(selection)

    def verdict(self, winner: str, *, prepare_ns: int) -> Verdict:
        """Return the verdict, with everybody's ratio to the winner; Inductor took `prepare_ns` to compile for it."""
        standings = [replace(self._standings[name], ratio=ratio) for name, ratio in self.ratios.items()]
        return Verdict(
            winner=winner,
            selection=self.selections[winner],
            standings=tuple(sorted(standings, key=lambda s: (s.name != winner, s.ratio))),
            num_steps=sum(comparison.num_steps for comparison in self._comparisons),
            prepare_ns=prepare_ns,
        )


def _steps_per_turn(step_ns: float) -> int:
    """Return how many steps a turn has, the one that is not timed included."""
    timed = math.ceil(TURN_NS / max(1.0, step_ns))
    return min(max(STEPS_PER_TURN, 1 + timed), MAX_STEPS_PER_TURN)
