"""The variants of one graph: each is a program that is loaded onto the target when it is first asked for.

    Variants(compilation, code, target, ...);  available, use(variant), run(inputs), adopt(compilation)

The plan is always there, and so are its segments in turn. A list schedule is there where it is predicted to be about as
fast as the plan, and Inductor's code of the whole graph once it was compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from apollo_compile.device.target import Code, Run, Runnable, Target
from apollo_compile.ir import Plan, Variant
from apollo_compile.ir.check import check_plan
from apollo_compile.observe import StageRunner
from apollo_compile.passes.plan import make_list_plan, make_serial_plan
from apollo_compile.pipeline import Compilation, compile_plan
from apollo_compile.session.monitor import is_same_placement

CLOSE = 0.05
"""Of a plan's predicted time, what a list schedule may be behind and compete all the same: predictions are wrong by
about as much."""


class Variants:
    """What one graph can run, and which of it runs now."""

    current: Variant
    run: Run
    """Runs the current variant."""

    def __init__(self, compilation: Compilation, code: Code, target: Target, *, may_be_listed: bool) -> None:
        """Load the plan; `may_be_listed`: whether a list schedule may compete with it."""
        self.code = code
        self._target = target
        self._may_be_listed = may_be_listed and Variant.LISTED in target.variants
        self._loaded: dict[Variant, Runnable] = {}
        """All but the plan."""
        self.current = Variant.PLAN
        self.adopt(compilation)

    def adopt(self, compilation: Compilation, runnable: Runnable | None = None) -> None:
        """Run this compilation of the same capture and partition from the next call on.

        `runnable` is what an earlier call made of it (`plan`), for those who go back and forth.
        """
        self.plan = self._target.load(compilation, self.code, Variant.PLAN) if runnable is None else runnable
        self.compilation = compilation
        self._listed: tuple[Compilation, Runnable] | None = None
        self._has_looked = False
        self._loaded.pop(Variant.LISTED, None)  # it was for other costs
        self.use(Variant.PLAN if self.current is Variant.LISTED else self.current)

    def update(self, compilation: Compilation) -> None:
        """Take over a plan of the same lanes and order, whose durations are nearer to the truth."""
        self.compilation = compilation

    @property
    def available(self) -> Sequence[Variant]:
        """What can run now; a plan that is to run in turn is not a variant of its own."""
        own = {Variant.SERIAL}
        if self.compilation.plan.uses_lanes:
            own |= {Variant.PLAN, *self._target.variants} - {Variant.LISTED}
            own |= {Variant.LISTED} if self._has_list_schedule() else set()
        return (*sorted(own), *sorted(self._loaded.keys() - own))

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on."""
        if variant is Variant.PLAN:
            self.run = self.plan.run
        else:
            if variant not in self._loaded:
                self._loaded[variant] = self._load(variant)
            self.run = self._loaded[variant].run
        self.current = variant

    def add_whole(self, run: Run) -> None:
        """Add the whole graph as Inductor compiled it."""
        self._loaded[Variant.INDUCTOR] = self._target.load_whole(self.compilation, self.code, run)

    def loaded(self) -> Mapping[Variant, Runnable]:
        """Return what was loaded until now."""
        return {Variant.PLAN: self.plan, **self._loaded}

    def release_others(self, kept: Collection[Variant]) -> None:
        """Let go of the memory that other variants hold for their next run; they can still run."""
        loaded = self.loaded()
        used = [loaded[variant] for variant in kept if variant in loaded]
        for runnable in loaded.values():
            if not any(runnable is each for each in used):  # a plan that is to run in turn is two variants
                runnable.release()

    def unload_others(self) -> None:
        """Let go of all variants but the current one and the plan."""
        self.release_others([self.current])
        self._loaded = {variant: each for variant, each in self._loaded.items() if variant is self.current}

    def promote_list_schedule(self) -> Variant:
        """Make the list schedule, if that is what runs, the plan; return what runs."""
        if self.current is Variant.LISTED and self._listed is not None:
            self.adopt(*self._listed)
        return self.current

    def _load(self, variant: Variant) -> Runnable:
        if variant is Variant.LISTED and self._has_list_schedule() and self._listed is not None:
            return self._listed[1]
        if variant is Variant.SERIAL:
            if not self.compilation.plan.uses_lanes and not self._target.binds_graphs:
                return self.plan
            old = self.compilation
            serial = self.with_plan(make_serial_plan(old.partition.graph, old.costs, old.plan))
            return self._target.load(serial, self.code, variant)
        if variant in self._target.variants:
            return self._target.load(self.compilation, self.code, variant)
        raise KeyError(f"{self.compilation.capture.name} cannot run the variant '{variant}'; it has {self.available}")

    def _has_list_schedule(self) -> bool:
        """Whether a list schedule may be as fast as the plan; it is made when that is asked for the first time."""
        old = self.compilation
        if self._may_be_listed and not old.plan.pinned and not self._has_looked:
            self._has_looked = True
            plan = make_list_plan(old.partition.graph, old.costs, old.plan)
            is_close = plan.makespan_ns <= min(old.plan.serial_ns, (1 + CLOSE) * old.plan.makespan_ns)
            if is_close and plan.uses_lanes and not is_same_placement(plan, old.plan):
                check_plan(plan, old.partition.graph, old.costs)
                compilation = self.with_plan(plan)
                self._listed = compilation, self._target.load(compilation, self.code, Variant.LISTED)
        return self._listed is not None

    def with_plan(self, plan: Plan) -> Compilation:
        """Return the compilation with another plan of the same costs."""
        old = self.compilation
        return compile_plan(
            old.capture, old.partition, old.observations, old.costs, plan, profile=old.profile, runner=StageRunner()
        )
