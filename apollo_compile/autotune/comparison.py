"""One comparison: candidates take turns in the user's own steps until one remains.

Measuring runs nothing twice: one step of the training loop, forward and backward, belongs to one candidate, a later
step to another.

Turns       Candidates take turns of `Rules.steps_per_turn` steps; the first ones of a turn are not timed, since they
            bring code and data of the candidate back into the caches. Short steps are noisy, so after the first round a
            turn has as many timed steps as take `TURN_NS`, up to `MAX_STEPS_PER_TURN` steps in all. A round is one turn
            of each candidate, every other round in reverse order, so that drift of the machine affects all alike. The
            time of a candidate in a round is the sum over the parts of a step (the graphs of a model) of the median of
            their timed calls. Two candidates are compared by the ratio of their times in the same round, since a
            disturbance slows both.
End         After `MIN_ROUNDS`, a candidate is eliminated if it lost to the leader (least median ratio) by more than a
            tie, in every round but one in eight: a one-sided sign test at about 5 %. The comparison ends when one
            candidate remains, when all that remain are tied beyond doubt, or after `MAX_ROUNDS`. The winner is the
            first candidate, in the order given (simplest first), whose median ratio to the leader is within a tie: a
            more complicated variant has to be worth it. The winner need not be certain: the wrong one of two equals
            costs nothing.

Guarantee: a round counts only if all candidates ran the same parts in it, including all required ones.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from apollo_compile.ir import MIN_ROUNDS, Standing
from apollo_compile.units import format_ns

MAX_STEPS_PER_TURN = 33
TURN_NS = 10_000_000
MAX_ROUNDS = 12
_TYPICAL_ROUNDS = (MIN_ROUNDS + MAX_ROUNDS) // 2
ALLOWED_WINS = 8
"""A loser may have won at most one in this many rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How steps are timed, and how many belong to a turn."""

    steps_per_turn: int = 3
    """Steps in a turn, the untimed ones included; more where steps are short."""
    untimed_steps: int = 1
    """The first steps of a turn."""
    warm_up_steps: int = 0
    """Further untimed steps in the first turn of a candidate."""
    tie: float = 0.01
    """Relative difference below which two times count as equal."""
    near: float = 0.02
    """Relative difference that a tie must exclude to end a comparison early."""
    is_timed_by_turn: bool = False
    """Whether the tuner times turns from border to border, instead of being given the time of every call."""


PER_CALL = Rules()
"""A call has ended when it returns."""

PER_TURN = Rules(steps_per_turn=12, untimed_steps=2, warm_up_steps=4, tie=0.02, near=0.04, is_timed_by_turn=True)
"""Calls return early: the device is waited for at the borders of turns only, so that steps overlap as they do in
training. The warm-up of a candidate is two launches, a capture, and a replay."""

Round = Mapping[str, Mapping[int, float]]
"""Per candidate and part of a step, the median nanoseconds of its calls."""


class Comparison:
    """Candidates take turns until one remains; see the top of this file.

    Arguments:
        names: the candidates, the simplest first, which wins ties.
        required: parts that every turn must have timed for its round to count.
        rules: how steps are timed.
    """

    def __init__(self, names: Sequence[str], required: Collection[int] = (0,), rules: Rules = PER_CALL) -> None:
        self.names = list(names)
        self.num_steps = 0
        self._required = frozenset(required)
        self._rules = rules
        self.remaining = list(names)
        """Names of the candidates that may still win."""
        self._timed_per_turn = rules.steps_per_turn - rules.untimed_steps
        self._steps_in_turn = 0
        self._samples: dict[int, list[int]] = defaultdict(list)
        self._round: dict[str, dict[int, float]] = {}
        """Times of the round that is running, by candidate whose turn is over."""
        self._rounds: list[Round] = []
        """Rounds that count."""
        self._num_played = 0
        """Number of rounds that are over, whether they count or not."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds that count."""
        return len(self._rounds)

    @property
    def steps_left(self) -> int:
        """About how many steps there are to come; fewer and fewer, unless turns become longer after the first round."""
        rounds = max(_TYPICAL_ROUNDS - self._num_played, math.ceil((MAX_ROUNDS - self._num_played) / 2))
        per_turn = self._untimed + self._timed_per_turn
        return (rounds * len(self.remaining) - len(self._round)) * per_turn - self._steps_in_turn

    @property
    def progress(self) -> str:
        """Times until now, as in `plan 41.2 ms, segments in turn 44.0 ms`."""
        times = (self.standing(name, self._leader()) for name in self.remaining)
        shown = (f"{each.name} {format_ns(round(each.step_ns))}" if each.num_rounds else each.name for each in times)
        return ", ".join(shown)

    @property
    def is_over(self) -> bool:
        """Whether the winner is known."""
        if len(self.remaining) == 1 or self._num_played >= MAX_ROUNDS:
            return True
        leader = self._leader()
        return self.num_rounds >= MIN_ROUNDS and all(self._is_surely_tied(name, leader) for name in self.remaining)

    @property
    def num_timed(self) -> int:
        """Number of timed steps of the turn until now, the current step included."""
        return max(0, self._steps_in_turn - self._untimed)

    @property
    def is_in_first_step(self) -> bool:
        """Whether the current step is the first of a turn."""
        return self._steps_in_turn == 1

    @property
    def is_turn_complete(self) -> bool:
        """Whether the step that begins belongs to another turn."""
        return self._steps_in_turn == self._untimed + self._timed_per_turn

    def begin_step(self) -> str | None:
        """Return the candidate of the step that begins now, or None if the comparison is over."""
        if self.is_turn_complete:
            self._end_turn()
        if self.is_over:
            return None
        self._steps_in_turn += 1
        self.num_steps += 1
        return self._candidate

    def record(self, ns: int, part: int = 0) -> None:
        """Record the duration of one part of the current step."""
        if self.num_timed:
            self._samples[part].append(ns)

    def winner(self) -> str:
        """Return the first candidate that is as fast as the leader, up to a tie."""
        leader = self._leader()
        return next(name for name in self.remaining if self._is_tied(name, leader))

    def ratio(self, name: str, other: str) -> float:
        """Return the median over rounds of the time of `name` over that of `other`."""
        ratios = self._ratios(name, other)
        return statistics.median(ratios) if ratios else 1.0

    def standing(self, name: str, winner: str) -> Standing:
        """Return the times of a candidate, relative to the winner."""
        times = [sum(result[name].values()) for result in self._rounds if name in result]
        return Standing(
            name=name,
            step_ns=statistics.median(times) if times else 0.0,
            ratio=self.ratio(name, winner),
            interval=interval_of_median(self._ratios(name, winner)),
            num_rounds=len(times),
        )

    def is_faster(self, name: str, other: str) -> bool:
        """Return whether `name` beats `other` by more than a tie, in nearly every round."""
        ratios = self._ratios(name, other)
        if len(ratios) < MIN_ROUNDS or statistics.median(ratios) * (1 + self._rules.tie) >= 1:
            return False
        return sum(ratio >= 1 for ratio in ratios) <= len(ratios) // ALLOWED_WINS

    @property
    def _untimed(self) -> int:
        return self._rules.untimed_steps + (0 if self._num_played else self._rules.warm_up_steps)

    @property
    def _candidate(self) -> str:
        """The candidate whose turn it is; every other round has the reverse order."""
        order = self.remaining[:: -1 if self._num_played % 2 == 0 else 1]
        return order[len(self._round)]

    def _is_tied(self, name: str, leader: str) -> bool:
        return self.ratio(name, leader) <= 1 + self._rules.tie

    def _is_surely_tied(self, name: str, leader: str) -> bool:
        _, high = interval_of_median(self._ratios(name, leader))
        return self._is_tied(name, leader) and high <= 1 + self._rules.near

    def _ratios(self, name: str, other: str) -> list[float]:
        both = [result for result in self._rounds if name in result and other in result]
        times = ((sum(result[name].values()), sum(result[other].values())) for result in both)
        return [time / reference for time, reference in times if reference > 0]

    def _leader(self) -> str:
        first = self.remaining[0]
        return min(self.remaining, key=lambda name: self.ratio(name, first))

    def _end_turn(self) -> None:
        self._round[self._candidate] = {part: statistics.median(samples) for part, samples in self._samples.items()}
        self._samples.clear()
        self._steps_in_turn = 0
        if len(self._round) == len(self.remaining):
            self._end_round()

    def _end_round(self) -> None:
        first, *others = (set(times) for times in self._round.values())
        if first >= self._required and all(other == first for other in others):
            self._rounds.append(self._round)
            fastest_ns = min(sum(times.values()) for times in self._round.values())
            untimed, steps = self._rules.untimed_steps, math.ceil(TURN_NS / max(1.0, fastest_ns))
            least = self._rules.steps_per_turn - untimed
            self._timed_per_turn = max(least, min(steps, MAX_STEPS_PER_TURN - untimed))
        self._num_played += 1
        self._round = {}
        leader = self._leader()
        self.remaining = [name for name in self.remaining if not self.is_faster(leader, name)]


def typical_steps(num_candidates: int, rules: Rules) -> int:
    """Return about how many steps a comparison of so many candidates takes."""
    return _TYPICAL_ROUNDS * num_candidates * rules.steps_per_turn


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median of the distribution with 90 % confidence, by order statistics.

    With fewer than five samples it is their range, which holds it less often.
    """
    if not samples:
        return (1.0, 1.0)
    ordered, count = sorted(samples), len(samples)
    outside = 0  # number of samples below the interval, and above it
    tail = 0.0  # probability that at most so many are below the median
    while outside < (count - 1) // 2:
        tail += math.comb(count, outside) / 2**count
        if 2 * (tail + math.comb(count, outside + 1) / 2**count) > 0.1:
            break
        outside += 1
    return ordered[outside], ordered[-1 - outside]
