"""The variants of one graph: each is a program that is loaded onto the target when it is first used.

The plan and the serial plan are always available; Inductor's code of the whole graph once it is compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from apollo_compile.ir import Plan, Variant
from apollo_compile.observe import StageRunner
from apollo_compile.passes.plan import make_serial_plan
from apollo_compile.pipeline import compile_plan
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, Run, Runnable, Target


class Variants:
    """The variants of one graph, and the one that runs now."""

    current: Variant
    run: Run
    """Runs the current variant."""

    def __init__(self, compilation: Compilation, code: Code, target: Target) -> None:
        """Load the plan."""
        self.code = code
        self.target = target
        self._loaded: dict[Variant, Runnable] = {}
        """Loaded variants other than the plan."""
        self.current = Variant.PLAN
        self.adopt(compilation)

    def adopt(self, compilation: Compilation) -> None:
        """Run this compilation of the same capture and partition as the plan from the next call on."""
        self.plan = self.target.load(compilation, self.code, Variant.PLAN)
        self.compilation = compilation
        self.use(self.current)

    @property
    def available(self) -> Sequence[Variant]:
        """The variants that can run now; a serial plan counts as `SERIAL`, not as `PLAN`."""
        own = {Variant.SERIAL, Variant.PLAN} if self.compilation.plan.uses_lanes else {Variant.SERIAL}
        return (*sorted(own), *sorted(self._loaded.keys() - own))

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on.

        Raises:
            KeyError: it is not available.
        """
        if variant is not Variant.PLAN and variant not in self._loaded:
            self._loaded[variant] = self._load_serial(variant)
        self.run = self.loaded()[variant].run
        self.current = variant

    def add(self, variant: Variant, runnable: Runnable) -> None:
        """Add a variant that is loaded already."""
        self._loaded[variant] = runnable

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

    def _load_serial(self, variant: Variant) -> Runnable:
        old = self.compilation
        if variant is not Variant.SERIAL:
            raise KeyError(f"{old.capture.name} cannot run the variant '{variant}'; it has {self.available}")
        if not old.plan.uses_lanes and not self.target.captures:
            return self.plan
        serial = make_serial_plan(old.partition.graph, old.costs, old.plan)
        return self.target.load(self.with_plan(serial), self.code, variant)

    def with_plan(self, plan: Plan) -> Compilation:
        """Return the compilation with another plan, made from the same costs."""
        old = self.compilation
        known = old.capture, old.partition, old.observations, old.costs
        return compile_plan(*known, plan, profile=old.profile, runner=StageRunner())
