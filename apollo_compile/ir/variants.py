"""The variants of a graph or of a training step, and the verdict of autotuning, which selects one."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from apollo_compile.units import format_ns


class Variant(enum.StrEnum):
    """One way to run a graph or a step; its value is its name in reports and in files."""

    SERIAL = "segments in turn"
    """The serial plan: segments one after the other on the whole device."""
    PLAN = "plan"
    INDUCTOR = "Inductor"
    """The whole graph as Inductor compiles it; of a step, its whole graphs in turn."""
    LOOP = "loop over micro-batches"
    """A step: forward and backward of one micro-batch after the other, called by autograd, then the optimizer."""
    EAGER = "loop in eager"
    """The same loop without a compiler."""
    TRACED = "Inductor, traced step"
    """A step: forward and backward of all micro-batches in one graph, as Dynamo traces and Inductor compiles it."""


MIN_ROUNDS = 5
"""Rounds of a comparison without which it has no winner."""

CLOSE = 1.05
"""Ratio to the winner below which a candidate is close: the same code is a few percent slower in one process than in
another, so each process finds its own winner among the close ones."""

_REFERENCES = {Variant.INDUCTOR: "torch.compile", Variant.TRACED: "torch.compile", Variant.EAGER: "eager"}
"""Name of the code that would run without apollo, as its users know it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Measured time of one candidate in a comparison."""

    name: str
    step_ns: float
    """Median over rounds of its time for one step."""
    ratio: float
    """Median over rounds of its time over the winner's in the same round; 1 for the winner."""
    interval: tuple[float, float] = (1.0, 1.0)
    """Interval of that median, with 90 % confidence."""
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of autotuning: the winner, and the candidates that it was compared with."""

    standings: tuple[Standing, ...]
    """The winner first, the others by ratio."""
    num_steps: int
    """Number of steps of the training loop in which it was measured."""
    is_remembered: bool = False
    """Whether it was measured in an earlier process."""
    prepare_ns: int = field(default=0, compare=False)
    """How long steps of this process waited for compiles of candidates."""

    def __post_init__(self) -> None:
        """Raise ValueError without standings or with an unknown winner, as a damaged file may hold."""
        if not self.standings:
            raise ValueError("a verdict has no standings; expected at least one, the winner first")
        Variant(self.standings[0].name)

    @property
    def winner(self) -> Variant:
        """The variant that runs."""
        return Variant(self.standings[0].name)

    @property
    def is_measured(self) -> bool:
        """Whether the winner was compared with another candidate."""
        return self.standings[0].num_rounds > 0

    @property
    def is_reliable(self) -> bool:
        """Whether enough rounds counted for later processes to rely on it."""
        return self.standings[0].num_rounds >= MIN_ROUNDS

    @property
    def remembered_ns(self) -> float:
        """How long a step of the winner took in an earlier process; 0 for a verdict of this one."""
        return self.standings[0].step_ns if self.is_remembered else 0.0

    @property
    def close(self) -> Sequence[str]:
        """The winner and candidates that are close to it, one of which may be the fastest in another process."""
        return [each.name for each in self.standings if each.ratio < CLOSE]

    def has_compared(self, name: str) -> bool:
        """Return whether the candidate called `name` was in the comparison."""
        return any(standing.name == name for standing in self.standings)

    @property
    def loop(self) -> str:
        """The training loop in which it was measured, in words."""
        return "an earlier training loop" if self.is_remembered else "the training loop"

    @property
    def pause(self) -> str:
        """Return how long the loop waited for compiles, as the end of a sentence; empty if it did not."""
        return f", one of which waited {format_ns(self.prepare_ns)} for Inductor to compile" if self.prepare_ns else ""

    @property
    def summary(self) -> str:
        """How fast the winner is, as in `1.42x as fast as torch.compile, 1.30x as eager`; empty if not measured.

        It is compared with what runs without apollo; with the next variant where that wins or was not compared.
        """
        others = self.standings[1:]
        if not others or not self.is_measured:
            return ""
        ratios = {each.name: each.ratio for each in others}
        known = {_REFERENCES[each]: ratios[each] for each in _REFERENCES if each in ratios}
        if not known or self.winner in _REFERENCES:
            return f"{others[0].ratio:.2f}x as fast as {others[0].name}"
        (name, ratio), *more = known.items()
        return ", ".join([f"{ratio:.2f}x as fast as {name}", *(f"{ratio:.2f}x as {name}" for name, ratio in more)])

    def time_of(self, standing: Standing) -> float:
        """Return the nanoseconds of a step of a candidate next to the winner's: times and ratios agree.

        Medians of different rounds need not, on a machine with other load.
        """
        return self.standings[0].step_ns * standing.ratio

    def __str__(self) -> str:
        first, *others = self.standings
        if not self.is_measured:
            return f"{first.name}; nothing could be compared with it"
        parts = [f"{first.name} {format_ns(round(first.step_ns))} a step"]
        parts += [f"{other.name} {format_ns(self.time_of(other))} ({other.ratio:.2f}x)" for other in others]
        of_whom = f" of {self.loop}" if self.is_remembered else ""
        return f"{', '.join(parts)}; measured in {self.num_steps} steps{of_whom}{self.pause}"
