"""What competes for steps late: variants whose compile first has to be a small share of the time that the loop has run.

LateVariants        what `StepTuner` asks for more variants, before each step
Later               one of what it compiles
LateRival           a rival of the program, which compiles in its first step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.session.compile_budget import CompileBudget

_logger = logging.getLogger(__name__)


class Later(Protocol):
    """Variants of a step that are compiled late."""

    @property
    def variants(self) -> Sequence[Variant]:
        """Those that may come of it."""

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


class LateVariants:
    """Compiles one thing after the other, each when it is due.

    Arguments:
        name: of the step.
        stages: what is compiled, in this order.
        budget: of the loop; steps count from the first that is settled.
        share: the largest share of their time that compiles may take.
        clock: time of the host in nanoseconds.
        is_strict: raise what would otherwise be logged.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Later],
        *,
        budget: CompileBudget,
        share: float,
        clock: Callable[[], int],
        is_strict: bool,
    ) -> None:
        self._name = name
        self._stages = list(stages)
        self._share = share
        self._clock = clock
        self._is_strict = is_strict
        self._budget = budget
        self._stage_began_ns: int | None = None
        """When the present stage began; None while none has."""

    @property
    def is_more_to_come(self) -> bool:
        """Whether something is still to be compiled."""
        return bool(self._stages)

    @property
    def awaited(self) -> Collection[Variant]:
        """Variants that may come of what is still to be compiled."""
        return {variant for stage in self._stages for variant in stage.variants}

    def leave_out(self, variants: Collection[Variant]) -> None:
        """Compile nothing of which only these variants may come, since they have been compared."""
        self._stages = [stage for stage in self._stages if not set(variants).issuperset(stage.variants)]

    def spend(self, ns: int) -> None:
        """Note how long a step waited for a compile of what has come."""
        self._budget.spend(ns)

    def advance(self) -> Sequence[Variant] | None:
        """Do what is due before a step.

        Return None where this step has to be a loop for it, and otherwise what is to be compared with the fastest until
        then, mostly nothing.
        """
        if self._stage_began_ns is None:
            if not self._stages:
                return ()
            self._budget.note_step()
            if not self._budget.allows(self._stages[0].cost_ns, self._share):
                return ()
            self._stage_began_ns = self._clock()
        added = self._try(self._stages[0])
        if added is not None:
            self._budget.spend(self._clock() - self._stage_began_ns)
            self._stage_began_ns = None
            del self._stages[0]
        return added

    def _try(self, stage: Later) -> Sequence[Variant] | None:
        try:
            return stage.advance()
        except Exception as error:  # training goes on as it did
            if self._is_strict:
                raise
            level = logging.INFO if isinstance(error, UnsupportedGraphError) else logging.WARNING
            _logger.log(
                level,
                "%s: no more to compare with: %s: %s; what runs stays, and a small 'plan.compile_share' puts this off",
                self._name,
                type(error).__name__,
                error,
            )
            return ()
        except BaseException:  # an interrupt, which the next step would come back to
            del self._stages[0]
            self._stage_began_ns = None
            raise


class LateRival:
    """A rival of the program, which compiles in its first step.

    Arguments:
        variants: it competes as the first, and if that cannot be compiled, as the next.
        cost_ns: approximate time of the compile.
    """

    def __init__(self, variants: Sequence[Variant], cost_ns: int) -> None:
        self.variants = variants
        self.cost_ns = cost_ns

    def advance(self) -> Sequence[Variant]:
        """Let it compete; see `Later`."""
        return self.variants[:1]
