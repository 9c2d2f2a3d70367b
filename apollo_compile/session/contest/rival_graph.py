"""One graph after AOTAutograd as our side of the comparison on a GPU runs it: `RivalGraph`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apollo_compile.config import Config
from apollo_compile.device.target import Run, Runnable
from apollo_compile.ir import Variant
from apollo_compile.observe import StageRunner
from apollo_compile.pipeline import Compilation, plan_partition
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.torch_bridge.traced import TracedGraph


@dataclass(eq=False)
class RivalGraph:
    """One graph after AOTAutograd, which calls it with a list of inputs that it empties."""

    traced: TracedGraph
    compilation: Compilation
    plain: Run
    """As Inductor compiled it, without a CUDA graph."""
    whole: Runnable
    """The same as one CUDA graph, or one for each set of sizes."""
    config: Config
    fail: Callable[[Exception], None]
    """Told what failed in a run, which ends all runs."""
    fail_in_timing: Callable[[Exception], None]
    """Told what failed while code was timed, which ends nothing else."""
    segments: CompiledGraph | None = None
    """Its segments, once their bodies are compiled."""
    variant: Variant = Variant.INDUCTOR
    is_timed: bool = False
    """Whether the present steps are for timing, so that Inductor's code runs, without a CUDA graph."""
    is_to_time: bool = False
    """Whether the next call times its bodies."""
    is_proven: bool = False
    """Whether it won: then it keeps no copies of what it writes to."""
    whole_ns: int | None = None
    """Time of `whole` on the device; None before it is measured."""
    has_failed: bool = False
    _boxed_call: bool = True

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the current variant; if it fails, what Inductor compiled."""
        if self.is_to_time:
            self._try_to_time(list(inputs))
        if self.has_failed or self.is_timed:
            return self.plain(inputs)
        kept, written = list(inputs), self._copies_of_written(inputs)
        try:
            return self._run(inputs)
        except Exception as error:  # an error of the user's comes again from what Inductor compiled
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            self.fail(error)
        for index, value in written.items():
            kept[index].copy_(value)
        return self.plain(kept)

    def use(self, variant: Variant) -> None:
        """Run this variant from the next call on."""
        self.variant = variant
        if self.segments is not None:
            self.segments.use(variant)

    def keep(self, variants: Collection[Variant]) -> None:
        """Release the CUDA graphs of all other variants."""
        if self.segments is not None:
            self.segments.keep(variants)
        elif Variant.INDUCTOR not in variants:
            self.whole.release()

    def has(self, variant: Variant) -> bool:
        """Whether it can run this variant."""
        return variant is Variant.INDUCTOR or (self.segments is not None and variant in self.segments.variants.loaded())

    def add_segments(self, segments: CompiledGraph) -> None:
        """Run in segments, too."""
        self.segments = segments
        segments.variants.add(Variant.INDUCTOR, self.whole)
        segments.use(self.variant)

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        if self.segments is not None:
            return self.segments.run_once(inputs)
        return self.whole.run(inputs)

    def _copies_of_written(self, inputs: Sequence[torch.Tensor]) -> Mapping[int, torch.Tensor]:
        written = () if self.is_proven else self.traced.contract.written_inputs or ()
        return {index: inputs[index].detach().clone() for index in written}

    def _try_to_time(self, inputs: Sequence[torch.Tensor]) -> None:
        self.is_to_time = False
        try:
            self._time_bodies(inputs)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self.fail_in_timing(error)

    def _time_bodies(self, inputs: Sequence[torch.Tensor]) -> None:
        """Time the bodies and the whole graph, for these inputs, and plan again."""
        assert self.segments is not None
        old, variants = self.segments.compilation, self.segments.variants
        observations = variants.plan.measure(inputs)
        whole = self.whole.measure(inputs)
        assert observations is not None and whole is not None, "runs of this device have no spans"
        self.whole_ns = sum(entry.median_ns for entry in whole.entries)
        variants.adopt(
            plan_partition(
                old.capture,
                old.partition,
                observations,
                profile=old.profile,
                config=self.config,
                runner=StageRunner(),
            )
        )
        self.compilation = self.segments.compilation
