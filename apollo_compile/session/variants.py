"""The variants of one graph: each is a program that is loaded onto the target when it is first asked for.

    Variants(compilation, code, target, ...);  available, use(variant), run(inputs), adopt(compilation)

The plan and the serial plan are always available; a list schedule if it is predicted to be about as fast as the plan,
and Inductor's code of the whole graph once it is compiled.
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
"""A list schedule is compared if its predicted time is above the plan's by at most this share: the error of predictions
is about as large."""


class Variants:
    """The variants of one graph, and the one that runs now."""

    current: Variant
    run: Run
    """Runs the current variant."""

    def __init__(self, compilation: Compilation, code: Code, target: Target, *, may_be_listed: bool) -> None:
        """Load the plan; `may_be_listed` allows the list schedule as a variant."""
        self.code = code
        self.target = target
        self._may_be_listed = may_be_listed and Variant.LISTED in target.variants
        self._loaded: dict[Variant, Runnable] = {}
        """Loaded variants other than the plan."""
        self._planned: dict[Variant, Compilation] = {}
        """Those that run another plan, which stays."""
        self.current = Variant.PLAN
        self.adopt(compilation)

    def adopt(self, compilation: Compilation, runnable: Runnable | None = None) -> None:
        """Run this compilation of the same capture and partition from the next call on.

        `runnable` is its program, if an earlier call has loaded it (as `plan`).
        """
        self.plan = self.target.load(compilation, self.code, Variant.PLAN) if runnable is None else runnable
        self.compilation = compilation
        self._listed: tuple[Compilation, Runnable] | None = None
        self._has_looked = False
        self._loaded.pop(Variant.LISTED, None)  # it was made from other costs
        self.use(Variant.PLAN if self.current is Variant.LISTED else self.current)

    def update(self, compilation: Compilation) -> None:
        """Replace the plan by one with the same lanes and order, but measured durations."""
        self.compilation = compilation

    @property
    def available(self) -> Sequence[Variant]:
        """The variants that can run now; a serial plan counts as `SERIAL`, not as `PLAN`."""
        own = {Variant.SERIAL}
        if self.compilation.plan.uses_lanes:
            own |= {Variant.PLAN, *self.target.variants} - {Variant.LISTED}
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
        """Add the `INDUCTOR` variant: the whole graph as Inductor compiled it."""
        self.add(Variant.INDUCTOR, self.target.load_whole(self.compilation, self.code, run))

    def add(self, variant: Variant, runnable: Runnable) -> None:
        """Add a variant that is loaded already."""
        self._loaded[variant] = runnable

    def add_plan(self, variant: Variant, compilation: Compilation, code: Code | None = None) -> None:
        """Add a variant that runs another plan of the same segments, with the same code unless other code is given."""
        self._planned[variant] = compilation
        self.add(variant, self.target.load(compilation, code or self.code, variant))

    def plan_of(self, variant: Variant) -> Compilation:
        """Return the compilation that a variant runs; that of the plan for those that run no plan of their own."""
        return self._planned.get(variant, self.compilation)

    def loaded(self) -> Mapping[Variant, Runnable]:
        """Return the loaded variants."""
        return {Variant.PLAN: self.plan, **self._loaded}

    def release_others(self, kept: Collection[Variant]) -> None:
        """Release the memory that variants not in `kept` hold for their next run; they can still run."""
        loaded = self.loaded()
        used = [loaded[variant] for variant in kept if variant in loaded]
        for runnable in loaded.values():
            if not any(runnable is each for each in used):  # a serial plan is both PLAN and SERIAL
                runnable.release()

    def unload(self, variants: Collection[Variant]) -> None:
        """Unload variants that do not run."""
        for variant in variants:
            unloaded = self._loaded.pop(variant, None)
            self._planned.pop(variant, None)
            if unloaded is not None:
                unloaded.release()

    def unload_others(self) -> None:
        """Unload all variants but the current one and the plan."""
        self.release_others([self.current])
        self._loaded = {variant: each for variant, each in self._loaded.items() if variant is self.current}

    def promote_list_schedule(self) -> Variant:
        """If the list schedule runs, make it the plan; return the current variant."""
        if self.current is Variant.LISTED and self._listed is not None:
            self.adopt(*self._listed)
        return self.current

    def _load(self, variant: Variant) -> Runnable:
        if variant is Variant.LISTED and self._has_list_schedule() and self._listed is not None:
            return self._listed[1]
        if variant is Variant.SERIAL:
            if not self.compilation.plan.uses_lanes and not self.target.binds_graphs:
                return self.plan
            old = self.compilation
            serial = self.with_plan(make_serial_plan(old.partition.graph, old.costs, old.plan))
            return self.target.load(serial, self.code, variant)
        if variant in self.target.variants:
            return self.target.load(self.compilation, self.code, variant)
        raise KeyError(f"{self.compilation.capture.name} cannot run the variant '{variant}'; it has {self.available}")

    def _has_list_schedule(self) -> bool:
        """Whether there is a list schedule about as fast as the plan; the first call makes it."""
        old = self.compilation
        if self._may_be_listed and not old.plan.pinned and not self._has_looked:
            self._has_looked = True
            plan = make_list_plan(old.partition.graph, old.costs, old.plan)
            is_close = plan.makespan_ns <= min(old.plan.serial_ns, (1 + CLOSE) * old.plan.makespan_ns)
            if is_close and plan.uses_lanes and not is_same_placement(plan, old.plan):
                check_plan(plan, old.partition.graph, old.costs)
                compilation = self.with_plan(plan)
                self._listed = compilation, self.target.load(compilation, self.code, Variant.LISTED)
        return self._listed is not None

    def with_plan(self, plan: Plan) -> Compilation:
        """Return the compilation with another plan, made from the same costs."""
        old = self.compilation
        return compile_plan(
            old.capture, old.partition, old.observations, old.costs, plan, profile=old.profile, runner=StageRunner()
        )
