"""The tuner of a training step: its program, its segments in turn, loops, and the step that Inductor traces.

They take turns in the user's own steps (`autotune/`), and the fastest stays. A verdict is kept for later processes
under the key of the program, like the findings about graphs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from apollo_compile.autotune.candidates import Candidate, CandidateError, CompileBudget
from apollo_compile.autotune.comparison import typical_steps
from apollo_compile.autotune.graphs import GraphTuner
from apollo_compile.autotune.tuner import Tuner
from apollo_compile.config import Config
from apollo_compile.ir import Variant, Verdict
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.model import NOT_YET, CompiledModel, describe_result, rules_of
from apollo_compile.session.step.program import StepProgram
from apollo_compile.session.step.traced import TracedStep, compile_ns
from apollo_compile.session.warm_start import WarmStart, may_be_compared

_logger = logging.getLogger(__name__)

_SIMPLEST_FIRST = (Variant.LOOP, Variant.EAGER, Variant.TRACED, Variant.INDUCTOR, Variant.SERIAL, Variant.PLAN)


def is_compared(model: CompiledModel, config: Config) -> bool:
    """Return whether the variants of a step of `model` take turns; if not, the program runs."""
    return may_be_compared(config) and model.ranks.is_alone


def steps_to_compare(model: CompiledModel, config: Config) -> int:
    """Return about how many steps it takes to compare the usual candidates that can run at once."""
    candidates = (Variant.LOOP, Variant.EAGER, Variant.SERIAL, Variant.PLAN)
    return typical_steps(len(candidates), rules_of(model.target)) if is_compared(model, config) else 0


class StepTuner:
    """Selects the variant that takes the steps of one program.

    Arguments:
        program: the step as one program.
        warm_start: recalls and keeps verdicts.
        budget: training time that compiles of late candidates may take.
        is_compared: whether variants are compared; if not, the program runs.
        is_alike_in_eager: whether the loop in eager computes the same, so that it may be compared.
        traced: the step as Inductor traces it; None where it may not take steps.
        prepare_whole: adds the variant `INDUCTOR`, Inductor's whole graphs in turn; None if that cannot be compiled.
        loop: tuner of the loop's graphs, which compares them where the loop is the fastest.
    """

    def __init__(
        self,
        program: StepProgram,
        warm_start: WarmStart,
        *,
        budget: CompileBudget,
        is_compared: bool,
        is_alike_in_eager: bool,
        traced: TracedStep | None,
        prepare_whole: Callable[[], None] | None,
        loop: GraphTuner,
    ) -> None:
        self.program = program
        self.held_back: str | None = None
        """Why the latest step was a loop instead of the selected variant."""
        self._warm_start = warm_start
        self._is_compared = is_compared
        self.traced = traced
        """The step as Inductor traces it; None where it may not take steps, and once it has lost."""
        self._loop = loop
        self._number = 0
        """Number of the latest step among all steps."""
        self._was_unready = False
        """Whether the latest step compiled its variant."""
        target = program.variants.target
        self._tuner = Tuner(
            program.name,
            rules=rules_of(target),
            budget=budget,
            tell=self._keep_verdict,
            keep=self._keep,
            now_ns=target.now_ns,
        )
        if is_compared:
            self._begin(self._candidates(is_alike_in_eager, prepare_whole))
        else:
            self._tuner.leave(Variant.PLAN)

    @property
    def verdict(self) -> Verdict | None:
        """The latest verdict; None before the first, and where nothing is compared."""
        return self._tuner.verdict

    @property
    def is_settled(self) -> bool:
        """Whether the variant that runs is known and ready, unless something holds it back."""
        return self._tuner.is_settled or (self.held_back is not None and not self._tuner.is_comparing)

    @property
    def is_more_to_come(self) -> bool:
        """Whether candidates are still to be compiled, once that is a small share of the training time."""
        return self._tuner.is_more_to_come or (self.current is Variant.LOOP and self._loop.tuner.is_more_to_come)

    @property
    def current(self) -> Variant:
        """The variant that was selected for the latest step."""
        return self._tuner.current

    def begin_step(self, number: int) -> Variant:
        """Return the variant of the step that begins, which has this number among all steps."""
        if number != self._number + 1:  # other steps were taken in between
            self._tuner.spoil()
        self._number = number
        variant = self._tuner.current if self._tuner.skip_step() else self._tuner.begin_step()
        self._was_unready = variant is Variant.TRACED and not self._is_traced_ready()
        return variant

    def record(self, ns: int) -> None:
        """Record how long the step took, from forward to optimizer, if the selected variant took it."""
        if self._was_unready:
            self._tuner.spend(ns)
        else:
            self._tuner.record(ns)

    def spoil(self) -> None:
        """Discard the times of this step: a loop takes it instead of the selected variant."""
        self._tuner.spoil()

    def hold_back(self, reason: str) -> None:
        """Note that this step is a loop instead, and why; one line says so if that is new."""
        self._tuner.spoil()
        if reason != self.held_back:
            self.held_back = reason
            _logger.info("%s: a %s for now: %s", self.program.name, Variant.LOOP, reason)

    def drop(self, variant: Variant, error: Exception) -> None:
        """Compare the others only: this variant of the program has failed."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        _logger.warning("%s: %s failed, and is not run again: %s", self.program.name, variant, first)
        if self._is_compared:
            self._tuner.drop(variant)
        else:
            self._tuner.leave(Variant.LOOP)

    def drop_traced(self, error: CandidateError) -> None:
        """Compare the others only: the traced step cannot be compiled, or computes something else."""
        _logger.info("%s: %s is not compared: %s", self.program.name, Variant.TRACED, error)
        self.traced = None
        self._tuner.drop(Variant.TRACED)

    @property
    def state(self) -> State:
        """The progress of its comparison, or the winner; and why a step is a loop instead, if it is."""
        verdict, tuner = self.verdict, self._tuner
        if not self.is_settled:
            loop = "" if self._loop.is_settled else f"graphs of the {Variant.LOOP}: {self._loop.progress}"
            return State(
                graph=self.program.name,
                stage=Stage.MEASURING,
                detail="; ".join(filter(None, (tuner.progress, loop))) + self._now,
                num_steps=tuner.steps_left + math.ceil(self._loop.steps_left / self.program.step.num_micro_batches),
                left_ns=tuner.left_ns or self._loop.left_ns,
            )
        num_lanes = self.program.variants.compilation.plan.num_lanes
        return State(
            graph=self.program.name,
            stage=Stage.SETTLED,
            detail=describe_result(verdict, [tuner.current], num_lanes)
            + self._now
            + f"; {NOT_YET}" * self.is_more_to_come,
            num_steps=0 if verdict is None or verdict.is_remembered else verdict.num_steps,
        )

    @property
    def _now(self) -> str:
        graphs = f"; its graphs: {self._loop.tuner.winner}" * (self.is_settled and self.current is Variant.LOOP)
        return f"{graphs}; now a {Variant.LOOP}: {self.held_back}" if self.held_back else graphs

    def __str__(self) -> str:
        return f"{self.verdict or self.current}{self._now}" if self.is_settled else str(self.state)

    # ------------------------------------------------------------------------------------------------- its parts

    def _candidates(self, is_alike_in_eager: bool, prepare_whole: Callable[[], None] | None) -> list[Candidate]:
        program = self.program
        loops = (Variant.LOOP, Variant.EAGER) if is_alike_in_eager else (Variant.LOOP,)
        own = {each: Candidate(variant=each) for each in (*loops, *program.variants.available)}
        own[Variant.LOOP] = Candidate(variant=Variant.LOOP, is_ready=lambda: self._loop.is_settled)
        if self.traced is not None:  # it is Inductor's code of the whole step, too
            own[Variant.TRACED] = Candidate(
                variant=Variant.TRACED, is_late=True, cost_ns=compile_ns(program), is_ready=self._is_traced_ready
            )
        elif prepare_whole is not None:
            own[Variant.INDUCTOR] = Candidate(
                variant=Variant.INDUCTOR, prepare=prepare_whole, is_late=True, cost_ns=compile_ns(program)
            )
        return [own[variant] for variant in _SIMPLEST_FIRST if variant in own]

    def _is_traced_ready(self) -> bool:
        return self.traced is None or self.traced.is_ready

    def _begin(self, candidates: Sequence[Candidate]) -> None:
        """Run the winner of an earlier process, or compare."""
        compilation = self.program.variants.compilation
        found = self._warm_start.recall(compilation.capture, compilation.partition)
        verdict = None if found is None else found.verdict
        if verdict is not None and any(each.variant is verdict.winner for each in candidates):
            self._tuner.adopt(verdict, candidates)
            if verdict.winner is Variant.LOOP and not self._tuner.is_comparing:
                self._loop.resume()
        else:
            self._tuner.offer(candidates, incumbent=Variant.LOOP)

    def _keep(self, variants: Collection[Variant]) -> None:
        """Release memory of others: CUDA graphs, which are captured again if they run, and the traced step for good."""
        if self.traced is not None and self.traced.is_ready and Variant.TRACED not in variants:
            self._tuner.forget(Variant.TRACED)
            self.traced = None
        if not self._tuner.is_comparing:
            self.program.variants.target.keep_only(variants)

    def _keep_verdict(self, verdict: Verdict) -> None:
        if verdict.is_reliable:
            self._warm_start.keep(self.program.variants.compilation, verdict.winner, verdict)
        if verdict.winner is Variant.LOOP:
            self._loop.resume()
