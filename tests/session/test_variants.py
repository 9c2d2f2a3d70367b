"""Variants of a graph are loaded when they are first used, and share what is the same program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from apollo_compile.ir import Span, Trace, Variant
from apollo_compile.session.variants import Variants
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import Code, CompiledBody, Target
from tests.reports.test_summary import compilation

CODE = Code(bodies=(CompiledBody(function=lambda inputs: inputs),))


@dataclass(eq=False)
class Program:
    """Answers with its own name; its segments take `factor` times as long as its plan says."""

    name: str
    made: Compilation
    factor: float
    num_runs: int = 0
    num_releases: int = 0

    def run(self, inputs: list[torch.Tensor]) -> Sequence[Any]:
        """Return the name."""
        self.num_runs += 1
        return [self.name]

    def release(self) -> None:
        """Count it."""
        self.num_releases += 1

    def trace(self) -> Trace:
        """Return a span for each segment, a millisecond after the one before."""
        spans = tuple(
            Span(segment=each.segment, lane=each.lane, start_ns=start, end_ns=start + taken, core=-1)
            for each in self.made.plan.assignments
            for start, taken in [(10**6 * each.segment, round(self.factor * each.duration_ns))]
        )
        return Trace(spans=spans, duration_ns=10**7)


@dataclass
class Device:
    """Loads programs that answer with their names, and takes `factor` times as long as plans say."""

    captures: bool = False
    factor: float = 1.0
    has_spans: bool = True
    loaded: list[tuple[Variant, int]] = field(default_factory=list)
    """Variant and number of lanes of what was loaded."""

    def load(self, made: Compilation, code: Code, variant: Variant) -> Program:
        """Load a program."""
        assert code is CODE
        self.loaded.append((variant, len({each.lane for each in made.plan.assignments})))
        return Program(f"{variant} {len(self.loaded)}", made, self.factor)


def variants_on(device: Device, letters: str = "*AB*") -> Variants:
    """Return the variants of a diamond; letters are the lanes of its segments."""
    return Variants(compilation(letters), CODE, cast(Target, device))


def test_the_plan_runs_first_and_the_others_are_loaded_when_used() -> None:
    """The serial plan, made from the same costs, has one lane. It goes on running whatever the plan is replaced by."""
    device = Device()
    variants = variants_on(device)
    assert variants.available == (Variant.PLAN, Variant.SERIAL)
    assert variants.run([]) == ["plan 1"]
    assert [variant for variant, _ in device.loaded] == [Variant.PLAN]
    for _ in range(2):
        variants.use(Variant.SERIAL)
    assert device.loaded[1:] == [(Variant.SERIAL, 1)]
    assert (variants.current, variants.run([])) == (Variant.SERIAL, [f"{Variant.SERIAL} 2"])
    variants.adopt(compilation("*BA*"))
    assert variants.run([]) == [f"{Variant.SERIAL} 2"]
    variants.use(Variant.PLAN)
    assert variants.run([]) == ["plan 3"]


def test_a_plan_on_one_lane_is_the_serial_variant() -> None:
    """One program, unless programs are captured: then a backward has to follow its forward's variant."""
    device = Device()
    variants = variants_on(device, "****")
    variants.use(Variant.SERIAL)
    assert variants.available == (Variant.SERIAL,) and len(device.loaded) == 1
    capturing = Device(captures=True)
    variants_on(capturing, "****").use(Variant.SERIAL)
    assert [variant for variant, _ in capturing.loaded] == [Variant.PLAN, Variant.SERIAL]


def test_losers_release_their_memory() -> None:
    """But not what another kept variant is too."""
    variants = variants_on(Device())
    whole = Program("whole", compilation(), 1.0)
    variants.add(Variant.INDUCTOR, cast(Any, whole))
    variants.release_others({Variant.PLAN})
    assert (whole.num_releases, cast(Any, variants.plan).num_releases) == (1, 0)
    variants.release_others({Variant.INDUCTOR})
    assert (whole.num_releases, cast(Any, variants.plan).num_releases) == (1, 1)
    serial = variants_on(Device(), "****")
    serial.use(Variant.SERIAL)
    serial.release_others({Variant.SERIAL})
    assert cast(Any, serial.plan).num_releases == 0
