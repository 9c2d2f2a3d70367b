"""What competes for steps late: variants whose compile first has to be a small share of the time that the loop has run.

Later               what `StepTuner` asks for more variants
JointProgram        the step with forward and backward in one graph of Inductor's
TunedPrograms       the step with code that Inductor tunes, as programs of a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from apollo_compile.device.target import Run
from apollo_compile.ir import Role, Variant
from apollo_compile.session.contest.challenge import Challenge
from apollo_compile.session.contest.tuned import TunedCode


class Later(Protocol):
    """Variants of a step that are compiled late."""

    @property
    def cost_ns(self) -> int:
        """Approximate time that steps will wait for the compile."""

    def advance(self) -> Sequence[Variant] | None:
        """Do some of it, before a step.

        Return None where this step has to be a loop for it; at last, the variants that are to be compared with the
        fastest until then, which are none if that is no use.

        Raises:
            Exception: a compile failed, which leaves what runs as it is.
        """


class JointProgram:
    """A program that runs forward and backward of a micro-batch as one graph, which Inductor compiles.

    Arguments:
        challenge: of the graph of the loss function.
        link: links a program with this code.
    """

    def __init__(self, challenge: Challenge, link: Callable[[Run], None]) -> None:
        self._challenge = challenge
        self._link = link
        self.cost_ns = challenge.recompile_ns

    def advance(self) -> Sequence[Variant]:
        """Compile and link it; see `Later`."""
        self._link(self._challenge.compile_joint())
        return (Variant.JOINT,)


class TunedPrograms:
    """Programs with tuned code of a micro-batch's forward and backward, which the challenge of its graph compiles.

    Arguments:
        challenge: of the graph of the loss function; programs for other numbers of micro-batches share it.
        link: links programs with this code; returns the variants that promise to be faster.
    """

    def __init__(self, challenge: Challenge, link: Callable[[Mapping[Role, TunedCode]], Sequence[Variant]]) -> None:
        self._challenge = challenge
        self._link = link
        self._tune_ns = challenge.tune_ns

    @property
    def cost_ns(self) -> int:
        """Approximate time that steps will wait for the compile; nothing if it was done for another program."""
        return 0 if self._challenge.has_tuned else self._tune_ns

    def advance(self) -> Sequence[Variant] | None:
        """Compile and time in steps that are loops, then link; see `Later`."""
        if not self._challenge.has_tuned:
            self._challenge.tune()
        if self._challenge.is_deciding:
            return None
        tuned = self._challenge.tuned
        return self._link(tuned) if tuned else ()
