"""One comparison: selections of variants take turns in the user's own steps until one remains.

A selection is the variant of every graph of a model. Measuring runs nothing twice: one step of the training loop,
forward and backward, belongs to one selection, a later step to another.

Turns       Selections take turns of `STEPS_PER_TURN` steps; the first step of a turn is not timed, since it brings the
            code and data of the selection back into the caches. Short steps are noisy, so after the first round a turn
            has as many timed steps as take `TURN_NS`, up to `MAX_STEPS_PER_TURN` steps in all. A round is one turn of
            each selection, every other round in reverse order, so that drift of the machine affects all alike. The
            time of a selection in a round is the sum over the graphs of the median of its timed calls, so forward and
            backward are judged together. Two selections are compared by the ratio of their times in the same round,
            since a disturbance slows both.
End         After `MIN_ROUNDS`, a selection is eliminated if it lost to the leader (least median ratio) by more than
            `TIE`, in every round but one in eight: a one-sided sign test at about 5 %. The comparison ends when one
            selection remains, or after `MAX_ROUNDS`. The winner is the first selection, in the order given (simplest
            first), whose median ratio to the leader is within `TIE`: a more complicated variant has to be worth it. The
            winner need not be certain: taking the wrong one of two equals costs nothing, and where times vary by a
            fifth, a rule that asks for three wins in four misses more than half of the plans that are a tenth faster.

Guarantees: a round counts only if all selections ran the same graphs in it, including all required ones.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from apollo_compile.ir import Selection, Standing, Verdict

STEPS_PER_TURN = 3
MAX_STEPS_PER_TURN = 33
TURN_NS = 10_000_000
MIN_ROUNDS = 5
MAX_ROUNDS = 12
TIE = 0.01
"""Relative difference below which two times count as equal."""
ALLOWED_WINS = 8
"""A loser may have won at most one in this many rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Where comparisons differ: by what a step's time is known, and what changing the winner costs."""

    steps_per_turn: int = STEPS_PER_TURN
    """Steps in a turn, the untimed ones included; more where steps are short."""
    untimed_steps: int = 1
    """The first steps of a turn."""
    tie: float = TIE
    """Relative difference below which two times count as equal."""
    is_first_kept: bool = False
    """Whether the first selection has won as soon as no other is ahead of it after `MIN_ROUNDS`."""


_USUAL = Rules()

IN_TURNS = Rules(steps_per_turn=12, untimed_steps=2, tie=0.02)
"""Where a step has not ended when its call returns: the device is waited for at the borders of turns only."""

Round = Mapping[str, Mapping[int, float]]
"""Per selection and graph, the median nanoseconds of its calls."""


class Comparison:
    """Selections take turns until one remains; see the top of this file for the rules.

    Arguments:
        selections: by name, the simplest first; it wins ties.
        required: indices of graphs that every turn must have timed for its round to count.
        settle: maps the round measured on this rank to the one that all ranks use.
        rules: where they are not those at the top of this file.
    """

    def __init__(
        self,
        selections: Mapping[str, Selection],
        required: Collection[int] = (0,),
        settle: Callable[[Round], Round] = lambda measured: measured,
        rules: Rules = _USUAL,
    ) -> None:
        self.selections = dict(selections)
        self.num_steps = 0
        self._required = frozenset(required)
        self._settle = settle
        self._alive = list(selections)
        self._order = list(selections)
        self._turn = 0
        self._rules = rules
        self._steps_per_turn = rules.steps_per_turn
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
        """Return which round it is in, as text."""
        number = self._num_rounds + 1
        limit = f"at least {MIN_ROUNDS}" if number <= MIN_ROUNDS else f"at most {MAX_ROUNDS}"
        return f"round {number} of {limit}"

    @property
    def remaining_names(self) -> str:
        """Return the names of the selections that may still win, as text."""
        *others, last = self._alive
        return f"{', '.join(others)} and {last}" if others else last

    def steps_left(self, num_rivals_later: int) -> int:
        """Return about how many steps are left if all rounds count.

        Arguments:
            num_rivals_later: selections of a comparison that follows; 0 if none does.
        """
        turns = max(1, MIN_ROUNDS - self._num_rounds) * len(self._alive) - self._turn
        return (turns + MIN_ROUNDS * num_rivals_later) * self._steps_per_turn - self._steps_in_turn

    @property
    def is_over(self) -> bool:
        """Whether the winner is known."""
        if len(self._alive) == 1 or self._num_rounds >= MAX_ROUNDS:
            return True
        is_judged = self._rules.is_first_kept and self.num_rounds >= MIN_ROUNDS
        return is_judged and self.winner() == next(iter(self.selections))

    @property
    def remaining_selections(self) -> Sequence[Selection]:
        """The selections that may still win."""
        return [self.selections[name] for name in self._alive]

    def begin_step(self) -> Selection | None:
        """Return the selection for the step that begins now, or None if the comparison is over."""
        if self._steps_in_turn == self._steps_per_turn:
            self._end_turn()
        if self.is_over:
            return None
        self._steps_in_turn += 1
        self.num_steps += 1
        return self.selections[self._order[self._turn]]

    @property
    def turn(self) -> str:
        """Return which turn it is in, as text, if no round is lost and none is added."""
        num_sides = len(self._alive)
        number = self._num_rounds * num_sides + self._turn + 1
        return f"turn {number} of {(MIN_ROUNDS if self._num_rounds < MIN_ROUNDS else MAX_ROUNDS) * num_sides}"

    @property
    def num_timed(self) -> int:
        """Timed steps of the current turn until now, the current step included."""
        return max(0, self._steps_in_turn - self._rules.untimed_steps)

    @property
    def is_in_last_step(self) -> bool:
        """Whether the current step is the last of a turn."""
        return self._steps_in_turn == self._steps_per_turn

    @property
    def is_in_first_step(self) -> bool:
        """Whether the current step is the first of a turn."""
        return self._steps_in_turn == 1

    def record(self, graph: int, ns: int) -> None:
        """Record the duration of one call in the current step."""
        if self.num_timed:
            self._samples[graph].append(ns)

    def winner(self) -> str:
        """Return the first selection that is as fast as the leader, up to a tie."""
        leader = self._leader()
        return next(name for name in self._alive if self.ratio(name, leader) <= 1 + self._rules.tie)

    def ratio(self, name: str, other: str, graph: int | None = None) -> float:
        """Return the median over rounds of the time of `name` over that of `other`; of one graph or of all."""
        ratios = self._ratios(name, other, graph)
        return statistics.median(ratios) if ratios else 1.0

    def standing(self, name: str, winner: str) -> Standing:
        """Return the times of a selection, relative to the winner."""
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
        if len(ratios) < MIN_ROUNDS or statistics.median(ratios) * (1 + self._rules.tie) >= 1:
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
            self._steps_per_turn = self._steps_that_take(min(sum(times.values()) for times in measured.values()))
        self._num_rounds += 1
        self._round = {}
        self._turn = 0
        leader = self._leader()
        self._alive = [name for name in self._alive if not self.is_faster(leader, name)]
        self._order = self._alive[:: 1 if self._num_rounds % 2 == 0 else -1]

    def _steps_that_take(self, step_ns: float) -> int:
        """Return the number of steps in a turn, untimed ones included, where a step takes so long."""
        rules = self._rules
        timed = math.ceil(TURN_NS / max(1.0, step_ns))
        return max(rules.steps_per_turn, min(rules.untimed_steps + timed, MAX_STEPS_PER_TURN))


class Results:
    """The results of all comparisons of one decision.

    Arguments:
        required: indices of graphs that must have run for a round to count.
        settle: as for `Comparison`.
        rules: likewise.
    """

    def __init__(
        self,
        required: Sequence[int],
        settle: Callable[[Round], Round] = lambda measured: measured,
        rules: Rules = _USUAL,
    ) -> None:
        self.selections: dict[str, Selection] = {}
        self.ratios: dict[str, float] = {}
        """Time of every selection over that of the latest winner."""
        self._graph_ratios: dict[str, dict[int, float]] = {}
        """The same per graph."""
        self._required = required
        self._settle = settle
        self._rules = rules
        self._comparisons: list[Comparison] = []
        self._standings: dict[str, Standing] = {}

    def hold(self, selections: Mapping[str, Selection], incumbent: str) -> Generator[Comparison, None, str]:
        """Run a comparison and return the name of the winner; it is `incumbent` if too few rounds count."""
        comparison = Comparison(selections, self._required, self._settle, self._rules)
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
        """Return the selection of the fastest variant of every graph; None if it was compared already.

        Ratios of different comparisons are chained, so this is a guess: the mixture still has to beat the winner.
        """
        selection = list(self.selections[winner])
        for graph in self._required:
            best = min(self._graph_ratios, key=lambda name: self._graph_ratios[name][graph])
            if self._graph_ratios[best][graph] * (1 + self._rules.tie) < 1:
                selection[graph] = self.selections[best][graph]
        return None if tuple(selection) in self.selections.values() else tuple(selection)

    def verdict(self, winner: str, *, prepare_ns: int) -> Verdict:
        """Return the verdict with all ratios to the winner; `prepare_ns` is how long Inductor compiled for it."""
        standings = [replace(self._standings[name], ratio=ratio) for name, ratio in self.ratios.items()]
        return Verdict(
            winner=winner,
            selection=self.selections[winner],
            standings=tuple(sorted(standings, key=lambda s: (s.name != winner, s.ratio))),
            num_steps=sum(comparison.num_steps for comparison in self._comparisons),
            prepare_ns=prepare_ns,
        )
