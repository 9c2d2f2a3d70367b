"""One FX graph of a model, compiled in segments: `CompiledGraph`, which AOTAutograd calls in every step.

What it runs may change between steps: it is planned again with measured durations (`learner.py`), and the autotuning of
its model (`autotune.py`) may choose another variant than its plan (`variants.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apollo_compile.config import Config
from apollo_compile.device.target import Code, CompiledBody, Run, Runnable, Target
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import RankError
from apollo_compile.ir import LaneId, Plan, Trace, Variant, Verdict
from apollo_compile.pipeline import Compilation
from apollo_compile.progress import Progress
from apollo_compile.session.autotune import Autotuner
from apollo_compile.session.buckets import at_once
from apollo_compile.session.learner import Learner
from apollo_compile.session.variants import Variants
from apollo_compile.session.warm_start import are_numbers_fixed
from apollo_compile.torch_bridge.boundary import Boundary

_logger = logging.getLogger(__name__)

COMPILE_NS_PER_OPERATOR = 50_000_000
"""Approximate compile time of Inductor and the C++ compiler per operator of a whole graph."""


@dataclass(eq=False)
class CompiledGraph:
    """Runs one FX graph as its current variant; AOTAutograd calls it with a list of inputs, which it empties.

    No slots: AOTAutograd wraps the callable of a backward and finds `_boxed_call` in its `__dict__`.
    """

    first: Compilation
    """The first plan, and what an earlier process found for this graph, if anything."""
    code: Code
    config: Config
    target: Target
    compile_whole: Callable[[], Run] | None = None
    """Compiles the whole graph as Inductor alone would; None where variants are not compared."""
    autotuner: Autotuner | None = None
    """Selects variants for the whole model; None where the plan always runs."""
    agreement: Agreement = field(default_factory=lambda: Agreement(Ranks(None)))
    """Makes all ranks run the same plans."""
    boundary: Boundary | None = None
    """Inputs and outputs that are not tensors."""
    submit: Callable[[Callable[[], Compilation]], Future[Compilation]] = at_once
    """Runs a replan: now, or in the background."""
    is_resized: bool = False
    """Whether it is planned for sizes other than those it was traced with."""
    is_deterministic: bool = field(init=False)
    """Whether deterministic algorithms were on when it was compiled, so that it keeps its plan."""
    variants: Variants = field(init=False)
    learner: Learner = field(init=False)
    has_run: bool = field(init=False, default=False)
    """Whether it was ever called."""
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        """Load the plan."""
        finding = self.first.finding
        self.is_deterministic = are_numbers_fixed()
        may_be_listed = self.config.plan.memory_quota is None
        self.variants = Variants(self.first, self.code, self.target, may_be_listed=may_be_listed)
        is_free = self.config.plan.replan and self.config.plan.planner != "serial" and not self.is_deterministic
        # One plan for all sizes is not observed: durations of different sizes are not comparable.
        is_for_its_sizes = not self.first.capture.sizes or has_free_plans(self.first.plan, self.config)
        self.learner = Learner(
            self.variants,
            self.target,
            self.config,
            self.agreement,
            self.submit,
            is_settled=not (is_free and is_for_its_sizes) or finding is not None,
        )
        if finding is not None:
            self.use(finding.variant)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph once and return its outputs."""
        if self.boundary is None:
            return self._call(inputs)
        taken = self.boundary.take(inputs)
        return self.boundary.give(self._call(inputs), taken)

    def planned_as(self, compilation: Compilation) -> CompiledGraph:
        """Return the same graph and code with a plan for other sizes and no observations."""
        return replace(self, first=compilation, autotuner=None, is_resized=True)

    def run_once(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the current variant, without measuring."""
        return self.variants.run(inputs)

    def _call(self, inputs: list[torch.Tensor]) -> Sequence[Any]:
        learner, is_synchronous = self.learner, self.target.is_synchronous
        if not is_synchronous and self.has_run and not learner.is_settled and not self.target.is_capturing():
            learner.time_bodies(inputs)
        if self.autotuner is None or self._is_left_alone(self.autotuner):
            outputs = self.variants.run(inputs)
        else:
            outputs = self._run_watched(inputs, self.autotuner)
        self.has_run = True
        if is_synchronous and not learner.is_settled and self.variants.current is Variant.PLAN:
            learner.after_run()
        return outputs

    def _run_watched(self, inputs: list[torch.Tensor], autotuner: Autotuner) -> Sequence[Any]:
        """Run the variant that autotuning selects, and record the time."""
        self._choose(autotuner)
        taken_ns, begin = None, self.target.now_ns()
        try:
            outputs = self.variants.run(inputs)
            taken_ns = self.target.now_ns() - begin
        finally:
            autotuner.leave(self, taken_ns)
        return outputs

    def _is_left_alone(self, autotuner: Autotuner) -> bool:
        """Whether autotuning ignores this call."""
        if self.target.is_synchronous:
            return autotuner.skips(self)
        return autotuner.is_settled or self.target.is_capturing()

    def _choose(self, autotuner: Autotuner) -> None:
        """Let autotuning select the variants of this step; if that fails, plans run from now on.

        Raises:
            RankError: this rank cannot run what the other ranks run.
        """
        try:
            autotuner.enter(self)
        except RankError:
            raise
        except Exception as error:
            if self.config.debug.strict:
                raise
            name = self.compilation.capture.name
            _logger.warning("%s: plans stay, unmeasured: %s: %s", name, type(error).__name__, error)

    # ------------------------------------------------------------------------------------------ what reports ask

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
    def progress(self) -> str | None:
        """The progress of its plan, as text; None where the plan is final, or does not run."""
        return self.learner.progress if self.variant == Variant.PLAN else None

    @property
    def variant_of_plan(self) -> Variant:
        """The current variant; `PLAN` also where the plan is serial and the serial variant runs."""
        return Variant.PLAN if self.variant == Variant.SERIAL and not self.compilation.plan.uses_lanes else self.variant

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the device memory that every lane holds for what it runs; empty on a CPU."""
        return self.variants.loaded().get(self.variant, self.variants.plan).lane_bytes()

    # ---------------------------------------------------------------------------------------- what autotuning asks

    @property
    def variant(self) -> Variant:
        """The variant that it runs now."""
        return self.variants.current

    @property
    def available(self) -> Sequence[Variant]:
        """Variants that it can run now."""
        return self.variants.available

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on."""
        self.variants.use(variant)

    @property
    def is_bound(self) -> bool:
        """Whether all graphs of its model have to run the same variant."""
        return self.target.binds_graphs

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
    def topic(self) -> str:
        """Its name among the ranks."""
        return self.agreement.topic

    def keep(self, variants: Collection[Variant]) -> None:
        """Release the CUDA graphs of all other variants; a variant that runs again captures again."""
        self.variants.release_others(variants)

    def adopt_variant(self) -> Variant:
        """If the list schedule runs, make it the plan, for reports and later processes; return the current variant."""
        return self.variants.promote_list_schedule()

    @property
    def prepare_ns(self) -> int:
        """Approximate time that Inductor needs to compile the whole graph; 0 if it has, or never will."""
        return 0 if self.compile_whole is None else COMPILE_NS_PER_OPERATOR * len(self.compilation.capture.nodes)

    def prepare(self) -> None:
        """Compile the whole graph with Inductor; if that fails, warn and do without that variant."""
        compile_whole = self.compile_whole
        if compile_whole is None:
            return
        name = self.compilation.capture.name
        _logger.info("%s: Inductor compiles it whole, to be compared with its segments", name)
        try:
            with Progress(f"compiling {name} whole") as progress:
                progress.at("Inductor, to be compared with its segments,")
                run = compile_whole()
            self.variants.add_whole(run)
        except Exception as error:  # the other variants are still compared
            if self.config.debug.strict:
                raise
            _logger.warning("%s: Inductor did not compile it whole: %s: %s", name, type(error).__name__, error)
        self.compile_whole = None  # once, whether it succeeds or not; again if it was interrupted


def has_free_plans(plan: Plan, config: Config) -> bool:
    """Whether other sizes may get other plans: not with a pinned or serial plan, or deterministic algorithms."""
    is_asked_for = plan.pinned or config.plan.planner == "serial"
    return not is_asked_for and not are_numbers_fixed()
