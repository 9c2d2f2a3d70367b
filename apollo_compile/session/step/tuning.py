"""What runs a training step: its program, its program in turn, Inductor's code of the traced step, or the loop.

They take turns in the user's own steps, by the rules of `comparison.py`, and the fastest stays. A verdict is kept for
later processes under the key of the program, like the findings about graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from apollo_compile.ir import Variant, Verdict
from apollo_compile.session.comparison import MIN_ROUNDS, Comparison
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
        self.is_tried = not is_compared
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

    def begin_step(self) -> Variant:
        """Return what runs the step that begins now."""
        if not self.is_tried:  # it compiles in its first step, which is not measured
            return Variant.TRACED
        if self._is_settled:
            return self._current
        if self._comparison is None:
            self._comparison = Comparison({str(variant): (variant,) for variant in self._variants()})
        selection = self._comparison.begin_step()
        if selection is None:
            self._settle(self._comparison)
        else:
            (self._current,) = selection
        return self._current

    def record(self, ns: int) -> None:
        """Note how long the step took, forward to optimizer."""
        if not self.is_tried:
            self.is_tried = True
        elif self._comparison is not None:
            self._comparison.record(0, ns)

    def drop_traced(self, error: Exception) -> None:
        """Do without Inductor's code of the traced step, which did not compile; compare the others."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        _logger.info("%s: Inductor does not compile the traced step: %s: %s", self._name, type(error).__name__, first)
        self.is_tried, self._traced = True, None
        self._is_settled, self.verdict, self._current = False, None, Variant.LOOP

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
        return [Variant.LOOP, *traced, *self.program.variants.available]

    def _settle(self, comparison: Comparison) -> None:
        is_known = comparison.num_rounds >= MIN_ROUNDS  # not where most steps had to be loops
        winner = comparison.winner() if is_known else str(Variant.LOOP)
        standings = [comparison.standing(name, winner) for name in comparison.selections]
        self._current = Variant(winner)
        self._is_settled, self._comparison = True, None
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
