"""The variants of a graph or of a training step, and the verdict of autotuning, which selects one."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from apollo_compile.units import format_ns


class Variant(enum.StrEnum):
    """One way to run a graph or a step; its value is its name in reports and in files."""

    SERIAL = "segments in turn"
    """The serial plan: segments one after the other on the whole device."""
    LISTED = "list schedule"
    """The plan of the best list schedule."""
    PLAN = "plan"
    NARROW = "plan with at most two concurrent segments"
    """A step on a GPU: another plan, in which at most two segments run at once."""
    INDUCTOR = "Inductor"
    """The whole graph, compiled by Inductor."""
    LOOP = "loop over micro-batches"
    """A step: forward and backward of one micro-batch after the other, called by autograd, then the optimizer."""
    EAGER = "loop in eager"
    """A step: `LOOP` without a compiler."""
    TRACED = "Inductor, traced step"
    """A step: forward and backward of all micro-batches in one graph, traced by Dynamo and compiled by Inductor."""
    COMPILED = "torch.compile"
    """A Dynamo graph on a GPU, compiled by torch.compile, with CUDA graphs if the mode asks for them."""


OWN_PLANS = (Variant.PLAN, Variant.NARROW)
"""Variants that run a plan of their own, which reports draw."""

Selection = tuple[Variant, ...]
"""The variant of every graph of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Measured time of one selection in a comparison."""

    name: str
    step_ns: float
    """Median over rounds of the time of its graphs in one step."""
    ratio: float
    """Median over rounds of its time over the winner's in the same round; 1 for the winner."""
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a comparison: the selected variants, and the selections they were compared with."""

    winner: str
    selection: Selection
    standings: tuple[Standing, ...]
    """The winner first, the others by ratio."""
    num_steps: int
    """Number of steps of the training loop in which it was measured."""
    is_remembered: bool = False
    """Whether it was measured in an earlier process."""
    prepare_ns: int = field(default=0, compare=False)
    """Time that a step of this process waited for Inductor to compile the whole graphs; 0 if none did."""

    def __post_init__(self) -> None:
        """Raise ValueError for a verdict without the standing of its winner, which a damaged file may hold."""
        if not self.standings or self.winner != self.standings[0].name:
            raise ValueError(f"a verdict needs standings, the winner {self.winner!r} first")

    @property
    def is_measured(self) -> bool:
        """Whether the winner was compared with another selection."""
        return self.standings[0].num_rounds > 0

    def has_compared(self, name: str) -> bool:
        """Return whether the selection called `name` was in the comparison."""
        return any(standing.name == name for standing in self.standings)

    @property
    def loop(self) -> str:
        """The training loop in which it was measured, in words."""
        return "an earlier training loop" if self.is_remembered else "the training loop"

    @property
    def pause(self) -> str:
        """The time that the loop waited for Inductor, as the end of a sentence; empty if it did not wait."""
        return f", one of which waited {format_ns(self.prepare_ns)} for Inductor to compile" if self.prepare_ns else ""

    def __str__(self) -> str:
        first, *others = self.standings
        if not self.is_measured:
            return f"{first.name}; nothing could be compared with it"
        parts = [f"{first.name} {format_ns(round(first.step_ns))} a step"]
        parts += [f"{other.name} {format_ns(round(other.step_ns))} ({other.ratio:.2f}x)" for other in others]
        of_whom = f" of {self.loop}" if self.is_remembered else ""
        return f"{', '.join(parts)}; measured in {self.num_steps} steps{of_whom}{self.pause}"
