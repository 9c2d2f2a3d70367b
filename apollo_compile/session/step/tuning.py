"""What runs a training step: its program, its program in turn, a rival that is not made of it, or the loop.

They take turns in the user's own steps, by the rules of `comparison.py`, and the fastest stays. A verdict is kept for
later processes under the key of the program, like the findings about graphs, where the target keeps any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.session.comparison import IN_TURNS, MIN_ROUNDS, Comparison, Rules
from apollo_compile.session.procedure import SIMPLEST_FIRST
from apollo_compile.session.step.later import LateRivals
from apollo_compile.session.step.program import StepProgram
from apollo_compile.session.step.rivals import RIVALS, Rival, RivalError
from apollo_compile.session.warm_start import WarmStart

_logger = logging.getLogger(__name__)


class StepTuner:
    """Selects what runs the steps of one program.

    Arguments:
        program: the step as one program.
        warm_start: recalls and keeps verdicts.
        is_compared: whether variants are compared; if not, the program runs.
        rivals: make what else takes such steps, by variant.
        late: those of them that are compiled once that is a small share of the loop's time.
    """

    def __init__(
        self,
        program: StepProgram,
        warm_start: WarmStart,
        *,
        is_compared: bool,
        rivals: Mapping[Variant, Callable[[], Rival]],
        late: LateRivals,
    ) -> None:
        self.program = program
        self.verdict: Verdict | None = None
        """None while variants are compared, and where they never are."""
        self.held_back: str | None = None
        """Why the latest step was a loop where something else was to run."""
        self._warm_start = warm_start
        self._rivals = dict(rivals) if is_compared else {}
        self._late = late
        self._entrants: Sequence[Variant] | None = None
        """Entrants of a comparison with a late rival, the winner until then first; None where all variants compete."""
        self._made: dict[Variant, Rival] = {}
        """Rivals that have begun to compete."""
        self._comparison: Comparison | None = None
        self._current = Variant.PLAN
        self._target = program.variants.target
        self._num_taken = 0
        """Steps of the current turn that this variant took."""
        self._turn_began_ns = 0
        self._turn_began_at = 0
        self._number = 0
        """Of the current step."""
        self._is_timed = False
        """Whether the current step is of the comparison, not one in which a rival is compiled."""
        self._is_compiling = False
        """Whether a rival is compiled in the current step."""
        self._failed: set[Variant] = set()
        self._is_compared = is_compared
        self._is_settled = not is_compared
        compilation = program.variants.compilation
        found = warm_start.recall(compilation.capture, compilation.partition) if is_compared else None
        if found is not None and found.verdict is not None and self._has(found.variant):
            self._is_settled, self._current, self.verdict = True, found.variant, found.verdict
            late.leave_out([standing.name for standing in found.verdict.standings])
            self._keep_winner()

    @property
    def is_settled(self) -> bool:
        """Whether it is known what runs, and that is compiled, unless something holds it back."""
        if not self._is_settled or self._current not in RIVALS or self.held_back is not None:
            return self._is_settled
        rival = self._made.get(self._current)
        return rival is not None and rival.is_ready

    @property
    def is_more_to_come(self) -> bool:
        """Whether rivals are still to be compiled, once that is a small share of the loop's time."""
        return not self._late.awaited.isdisjoint(self._rivals)

    @property
    def current(self) -> Variant:
        """What ran the latest step."""
        return self._current

    @property
    def rivals(self) -> Sequence[Rival]:
        """What may take steps besides the program, from its first step on until it has lost."""
        return list(self._made.values())

    def get_rival(self, variant: Variant) -> Rival:
        """Return what takes steps under this name."""
        if variant not in self._made:
            self._made[variant] = self._rivals[variant]()
        return self._made[variant]

    def _has(self, variant: Variant) -> bool:
        """Whether this variant can run, here and now."""
        if variant in RIVALS:
            return variant in self._rivals
        return variant in (Variant.LOOP, Variant.PLAN) or variant in self.program.variants.available

    def begin_step(self, number: int) -> Variant:
        """Return what runs the step that begins now, which has this number among all steps."""
        self._is_timed = self._is_compiling = False
        if self._is_settled and self.is_more_to_come and self.held_back is None:
            added = self._late.take_due()
            if added is not None:
                self._entrants, self._is_settled, self._comparison = [self._current, added], False, None
        if self._is_settled:
            return self._current
        for rival in self._competing():
            if not self.get_rival(rival).is_ready:
                self._is_compiling = True
                return rival  # it compiles in its first steps, which are not measured
        if self._comparison is None:
            rules = Rules() if self._target.is_synchronous else IN_TURNS
            self._comparison = Comparison({str(variant): (variant,) for variant in self._variants()}, rules=rules)
        selection = self._comparison.begin_step()
        if selection is None:
            self._settle(self._comparison)
        else:
            (self._current,) = selection
            self._is_timed = True
            self._begin_turn(self._comparison, number)
        return self._current

    def record(self, ns: int) -> None:
        """Note how long the step took, forward to optimizer."""
        comparison = self._comparison
        if self._is_compiling:
            self._late.spend(ns)
        if comparison is None or not self._is_timed:
            return
        if self._target.is_synchronous:
            comparison.record(0, ns)
        else:
            self._num_taken += 1
            num_steps = self._number - self._turn_began_at + 1
            if comparison.is_in_last_step and self._num_taken == num_steps == comparison.num_timed:
                comparison.record(0, (self._target.now_ns() - self._turn_began_ns) // comparison.num_timed)

    def _begin_turn(self, comparison: Comparison, number: int) -> None:
        """Begin to time a turn, in its first timed step, if steps have not ended when their calls return.

        A turn counts if all its steps were of this program and variant: what others take in between would be timed too.
        """
        self._number = number
        if comparison.num_timed == 1 and not self._target.is_synchronous:
            self._turn_began_ns, self._turn_began_at, self._num_taken = self._target.now_ns(), number, 0

    def drop(self, variant: Variant, error: Exception) -> None:
        """Do without a variant of the program that failed; compare the others."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        _logger.warning("%s: no %s: %s", self._name, variant, first)
        self._failed.add(variant)
        self._leave_out(variant)

    def drop_rival(self, variant: Variant, error: RivalError) -> None:
        """Do without a rival that cannot be compiled."""
        _logger.info("%s: no %s to compare with: %s", self._name, variant, error)
        self._made.pop(variant, None)
        self._rivals.pop(variant, None)
        self._leave_out(variant)

    def _leave_out(self, variant: Variant) -> None:
        """Compare without a variant: what was added late and has failed leaves the fastest until then."""
        if self._entrants is None or variant is self._entrants[0]:
            self._restart()
            return
        left = [each for each in self._entrants if each is not variant]
        self._is_settled, self._comparison, self._current = len(left) == 1, None, left[0]
        self._entrants = None if self._is_settled else left

    def _restart(self) -> None:
        self._is_settled = not self._is_compared
        self.verdict, self._current, self._comparison, self._entrants = None, Variant.LOOP, None, None

    def __str__(self) -> str:
        now = f"; now a {Variant.LOOP}: {self.held_back}" if self.held_back else ""
        return f"{self._state}{now}"

    @property
    def _state(self) -> str:
        if self.verdict is not None:
            return str(self.verdict)
        if self._is_settled:
            return str(self._current)
        return "being measured" + ("" if self._comparison is None else f": {self._comparison.progress}")

    @property
    def _name(self) -> str:
        return self.program.variants.compilation.capture.name

    def _variants(self) -> list[Variant]:
        if self._entrants is not None:
            return list(self._entrants)
        own = set(self.program.variants.available) - self._failed
        if Variant.INDUCTOR in own:  # segments in turn are the same with more kernels
            own.discard(Variant.SERIAL)
        return [Variant.LOOP, *self._competing(), *(variant for variant in SIMPLEST_FIRST if variant in own)]

    def _competing(self) -> list[Variant]:
        """Return the rivals that compete; not those that are to be compiled later."""
        return [variant for variant in self._rivals if variant not in self._late.awaited]

    def _settle(self, comparison: Comparison) -> None:
        is_known = comparison.num_rounds >= MIN_ROUNDS  # not where most steps had to be loops
        stays = Variant.LOOP if self._entrants is None else self._entrants[0]
        winner = comparison.winner() if is_known else str(stays)
        standings = [comparison.standing(name, winner) for name in comparison.selections]
        self._current = Variant(winner)
        self._is_settled, self._comparison, self._entrants = True, None, None
        if not self._target.is_synchronous:
            self._target.keep_only({self._current})  # the winner is captured again, with memory for it alone
        self._keep_winner()
        if not is_known:
            _logger.info("%s: %s stays, since too few steps could be compared", self._name, stays)
            return
        self.verdict = Verdict(
            winner=winner,
            selection=(self._current,),
            standings=tuple(
                sorted([*standings, *self._earlier(standings)], key=lambda each: (each.name != winner, each.ratio))
            ),
            num_steps=comparison.num_steps + (0 if self.verdict is None else self.verdict.num_steps),
        )
        _logger.info("%s: chosen by measuring: %s", self._name, self.verdict)
        self._warm_start.keep(self.program.variants.compilation, self._current, self.verdict)

    def _earlier(self, standings: Sequence[Standing]) -> list[Standing]:
        """Return the standings of what lost before, by the ratio that the winner until then has in this comparison."""
        before = self.verdict
        if before is None:
            return []
        ratios = {each.name: each.ratio for each in standings}
        scale = ratios.get(before.winner, 1.0)
        return [replace(each, ratio=each.ratio * scale) for each in before.standings if each.name not in ratios]

    def _keep_winner(self) -> None:
        """Forget rivals that do not run steps from now on, with all that they hold."""
        winner = self._current
        self._made = {variant: rival for variant, rival in self._made.items() if variant is winner}
        kept = {winner, *self._late.awaited}
        self._rivals = {variant: make for variant, make in self._rivals.items() if variant in kept}
