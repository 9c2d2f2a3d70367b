"""What runs a training step: its program, its program in turn, Inductor's code of the traced step, or the loop.

They take turns in the user's own steps, by the rules of `comparison.py`, and the fastest stays. A verdict is kept for
later processes under the key of the program, like the findings about graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from apollo_compile.ir import Variant, Verdict
from apollo_compile.session.comparison import IN_TURNS, MIN_ROUNDS, Comparison, Rules
from apollo_compile.session.procedure import SIMPLEST_FIRST
from apollo_compile.session.step.program import StepProgram
from apollo_compile.session.warm_start import WarmStart
from apollo_compile.torch_bridge.traced_step import TracedStep

_logger = logging.getLogger(__name__)


class StepTuner:
    """Selects what runs the steps of one program.

    Arguments:
        program: the step as one program.
        warm_start: recalls and keeps verdicts.
        is_compared: whether variants are compared; if not, the program runs.
        make_traced: returns the step for Inductor to trace and compile, when it is first called.
    """

    def __init__(
        self,
        program: StepProgram,
        warm_start: WarmStart,
        *,
        is_compared: bool,
        make_traced: Callable[[], TracedStep],
    ) -> None:
        self.program = program
        self.verdict: Verdict | None = None
        """None while variants are compared, and where they never are."""
        self.held_back: str | None = None
        """Why the latest step was a loop where something else was to run."""
        self._warm_start = warm_start
        self._make_traced = make_traced
        self._traced: TracedStep | None = None
        self._comparison: Comparison | None = None
        self._current = Variant.PLAN
        self._target = program.variants.target
        self._num_taken = 0
        """Steps of the current turn that this variant took."""
        self._turn_began_ns = 0
        self._turn_began_at = 0
        self._number = 0
        """Of the current step."""
        self._failed: set[Variant] = set()
        self._is_compared = is_compared
        self.is_tried = not is_compared or not self._target.is_synchronous
        """Whether Inductor has compiled the traced step, or failed to."""
        self._is_settled = not is_compared
        compilation = program.variants.compilation
        found = warm_start.recall(compilation.capture, compilation.partition) if is_compared else None
        if found is not None and found.verdict is not None:
            self.is_tried = found.variant is not Variant.TRACED
            self._is_settled, self._current, self.verdict = True, found.variant, found.verdict

    @property
    def is_settled(self) -> bool:
        """Whether it is known what runs."""
        return self._is_settled

    @property
    def current(self) -> Variant:
        """What ran the latest step."""
        return self._current

    @property
    def traced(self) -> TracedStep:
        """The step that Inductor compiles."""
        if self._traced is None:
            self._traced = self._make_traced()
        return self._traced

    def begin_step(self, number: int) -> Variant:
        """Return what runs the step that begins now, which has this number among all steps."""
        if not self.is_tried:  # it compiles in its first step, which is not measured
            return Variant.TRACED
        if self._is_settled:
            return self._current
        if self._comparison is None:
            rules = Rules() if self._target.is_synchronous else IN_TURNS
            self._comparison = Comparison({str(variant): (variant,) for variant in self._variants()}, rules=rules)
        selection = self._comparison.begin_step()
        if selection is None:
            self._settle(self._comparison)
        else:
            (self._current,) = selection
            self._begin_turn(self._comparison, number)
        return self._current

    def record(self, ns: int) -> None:
        """Note how long the step took, forward to optimizer."""
        comparison = self._comparison
        if not self.is_tried:
            self.is_tried = True
        elif comparison is not None and self._target.is_synchronous:
            comparison.record(0, ns)
        elif comparison is not None:
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
        self._restart()

    def drop_traced(self, error: Exception) -> None:
        """Do without Inductor's code of the traced step, which did not compile; compare the others."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        _logger.info("%s: Inductor does not compile the traced step: %s: %s", self._name, type(error).__name__, first)
        self.is_tried, self._traced = True, None
        self._restart()

    def _restart(self) -> None:
        self._is_settled = not self._is_compared
        self.verdict, self._current, self._comparison = None, Variant.LOOP, None

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
        traced = [Variant.TRACED] if self._traced is not None else []
        own = set(self.program.variants.available) - self._failed
        if Variant.INDUCTOR in own:  # segments in turn are the same with more kernels
            own.discard(Variant.SERIAL)
        return [Variant.LOOP, *traced, *(variant for variant in SIMPLEST_FIRST if variant in own)]

    def _settle(self, comparison: Comparison) -> None:
        is_known = comparison.num_rounds >= MIN_ROUNDS  # not where most steps had to be loops
        winner = comparison.winner() if is_known else str(Variant.LOOP)
        standings = [comparison.standing(name, winner) for name in comparison.selections]
        self._current = Variant(winner)
        self._is_settled, self._comparison = True, None
        if not self._target.is_synchronous:
            self._target.keep_only({self._current})  # the winner is captured again, with memory for it alone
        if not is_known:
            _logger.info("%s: the loop stays, since too few steps could be compared", self._name)
            return
        self.verdict = Verdict(
            winner=winner,
            selection=(self._current,),
            standings=tuple(sorted(standings, key=lambda each: (each.name != winner, each.ratio))),
            num_steps=comparison.num_steps,
        )
        if self._current is not Variant.TRACED:
            self._traced = None
        _logger.info("%s: chosen by measuring: %s", self._name, self.verdict)
        self._warm_start.keep(self.program.variants.compilation, self._current, self.verdict)
