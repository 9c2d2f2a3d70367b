"""One FX graph of a model, compiled in segments: `CompiledGraph`, which AOTAutograd calls in every step.

Its executable may change between steps: it is planned again with measured durations (`learner.py`), and the tuner of
its model may choose another variant than its plan (`variants.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apollo_compile.autotune.candidates import CandidateError
from apollo_compile.autotune.graphs import GraphTuner
from apollo_compile.config import Config
from apollo_compile.ir import LaneId, Trace, Variant, Verdict
from apollo_compile.progress import Progress
from apollo_compile.session.learner import Learner
from apollo_compile.session.variants import Variants
from apollo_compile.session.warm_start import are_numbers_fixed
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, CompiledBody, Run, Runnable, Target
from apollo_compile.torch_bridge.boundary import Boundary
from apollo_compile.torch_bridge.private_attributes import mark_boxed

_logger = logging.getLogger(__name__)

COMPILE_NS_PER_OPERATOR = 25_000_000
"""Approximate compile time of Inductor and the C++ compiler per operator of a whole graph: 15 to 33 ms on two cores."""


@dataclass(eq=False)
class CompiledGraph:
    """Runs one FX graph as its current variant; AOTAutograd calls it with a list of inputs, which it empties.

    No slots: AOTAutograd wraps the callable of a backward and looks for its mark in `__dict__`.
    """

    first: Compilation
    """The first plan, and the finding of an earlier process about this graph, if there is one."""
    code: Code
    config: Config
    target: Target
    compile_whole: Callable[[], Run] | None = None
    """Compiles the whole graph as Inductor alone would; None where it is not compared, or was already."""
    tuner: GraphTuner | None = None
    """Selects the variant of all graphs of the model; None where the plan always runs."""
    is_alone: bool = True
    """Whether no other rank runs it, so that it may be planned again with durations that were measured here."""
    boundary: Boundary | None = None
    """Inputs and outputs that are not tensors."""
    sized: Sequence[int] = ()
    """Positions of the tensors whose sizes change from call to call."""
    is_deterministic: bool = field(init=False)
    """Whether deterministic algorithms were enabled when it was compiled, so that it keeps its plan."""
    variants: Variants = field(init=False)
    learner: Learner = field(init=False)
    has_run: bool = field(init=False, default=False)
    """Whether the graph was ever called."""
    _usual_elements: int = 0
    """Elements of the sized tensors in its first timed call."""

    def __post_init__(self) -> None:
        """Load the plan."""
        mark_boxed(self)
        finding = self.first.finding
        self.is_deterministic = are_numbers_fixed()
        self.variants = Variants(self.first, self.code, self.target)
        may_replan = self.config.plan.replan and self.config.plan.planner != "serial" and not self.is_deterministic
        is_comparable = self.is_alone and not self.first.capture.sizes  # durations for other sizes are not
        self.learner = Learner(
            self.variants,
            self.target,
            self.config,
            is_settled=not (may_replan and is_comparable) or finding is not None,
        )
        if finding is not None:
            self.use(finding.variant)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph once and return its outputs."""
        if self.boundary is None:
            return self._call(inputs)
        taken = self.boundary.take(inputs)
        return self.boundary.give(self._call(inputs), taken)

    def _call(self, inputs: list[torch.Tensor]) -> Sequence[Any]:
        learner, target = self.learner, self.target
        if target.captures and target.is_capturing():  # by the user: nothing may be timed or changed
            return self.variants.run(inputs)
        if not (target.has_spans or learner.is_settled) and self.has_run:
            learner.time_bodies(inputs)
        if self.tuner is None or self.tuner.skips(self):
            outputs = self.variants.run(inputs)
        else:
            outputs = self._run_watched(inputs, self.tuner)
        self.has_run = True
        if target.has_spans and not learner.is_settled and self.variants.current is Variant.PLAN:
            learner.after_run()
        return outputs

    def _run_watched(self, inputs: list[torch.Tensor], tuner: GraphTuner) -> Sequence[Any]:
        """Run the variant that the tuner selects, and give it the duration; if it fails, plans run from now on."""
        try:
            tuner.enter(self)
        except Exception as error:
            if self.config.debug.strict:
                raise
            name = self.compilation.capture.name
            line = "%s: autotuning failed, so the plan runs from now on: %s: %s"
            _logger.warning(line, name, type(error).__name__, error)
        taken_ns, clock, scale = None, tuner.tuner.clock, 1.0
        if self.sized:  # makes the duration of this call comparable with calls for other sizes
            num_elements = sum(inputs[place].numel() for place in self.sized)
            self._usual_elements = self._usual_elements or num_elements
            scale = self._usual_elements / max(1, num_elements)
        begin = clock()
        try:
            outputs = self.variants.run(inputs)
            taken_ns = round(scale * (clock() - begin))
        finally:
            tuner.leave(self, taken_ns)
        return outputs

    # ------------------------------------------------------------------------------------------------ for reports

    @property
    def compilation(self) -> Compilation:
        """The products behind its plan."""
        return self.variants.compilation

    @property
    def executable(self) -> Runnable:
        """The program of its plan."""
        return self.variants.plan

    @property
    def bodies(self) -> Sequence[CompiledBody]:
        """Its code, by the id of the body."""
        return self.code.bodies

    @property
    def num_replans(self) -> int:
        """Number of replans with measured durations."""
        return self.learner.num_replans

    def trace(self) -> Trace:
        """Return the spans of the plan's last run."""
        return self.variants.plan.trace()

    @property
    def runs_left(self) -> int:
        """The most runs until its plan is final; 0 where it is, or does not run."""
        return self.learner.runs_left if self.variant == Variant.PLAN else 0

    @property
    def variant_of_plan(self) -> Variant:
        """The current variant; `PLAN` also where the plan is serial and the serial variant runs."""
        return Variant.PLAN if self.variant == Variant.SERIAL and not self.compilation.plan.uses_lanes else self.variant

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the device memory that every lane holds for the current variant; empty on a CPU."""
        return self.variants.loaded().get(self.variant, self.variants.plan).lane_bytes()

    # ---------------------------------------------------------------------------------------------- for the tuner

    @property
    def variant(self) -> Variant:
        """The variant that it runs now."""
        return self.variants.current

    def variant_for(self, variant: Variant) -> Variant:
        """Return this variant, or segments in turn if the graph does not have it."""
        return variant if variant is Variant.PLAN or variant in self.variants.available else Variant.SERIAL

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on, or segments in turn if it does not have it."""
        own = self.variant_for(variant)
        if own is not self.variant:
            self.variants.use(own)

    @property
    def is_settled(self) -> bool:
        """Whether its plan is final."""
        return self.learner.is_settled

    @property
    def remembered(self) -> Verdict | None:
        """The verdict of an earlier process, whose plan it runs; None if there is none."""
        finding = self.compilation.finding
        return None if finding is None else finding.verdict

    @property
    def prepare_ns(self) -> int:
        """Approximate time that Inductor needs to compile the whole graph."""
        return COMPILE_NS_PER_OPERATOR * len(self.compilation.capture.nodes)

    def whole(self) -> Run:
        """Compile the whole graph with Inductor.

        Raises:
            CandidateError: that fails, or was not to be compared.
        """
        compile_whole, name = self.compile_whole, self.compilation.capture.name
        if compile_whole is None:
            raise CandidateError(f"{name} has no graph that Inductor could compile")
        _logger.info("%s: Inductor compiles the whole graph, to compare it with its segments", name)
        try:
            with Progress(f"compiling {name} whole", expected_ns=self.prepare_ns) as progress:
                progress.at("Inductor, to be compared with its segments,")
                return compile_whole()
        except Exception as error:  # the other variants are still compared
            if self.config.debug.strict:
                raise
            raise CandidateError(f"Inductor cannot compile {name} whole: {type(error).__name__}: {error}") from error

    def prepare(self) -> None:
        """Add the variant `INDUCTOR`; see `whole`."""
        if Variant.INDUCTOR not in self.variants.available:
            whole = self.target.load_whole(self.compilation, self.code, self.whole())
            self.variants.add(Variant.INDUCTOR, whole)
