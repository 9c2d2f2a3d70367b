"""Rivals of a program that wait until their compile is a small share of the time that the loop has trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from apollo_compile.ir import Variant
from apollo_compile.session.compile_budget import CompileBudget


class LateRivals:
    """Tells when a rival may compile.

    Arguments:
        costs_ns: approximate compile time by variant, the first to compile first.
        budget: of the loop; it counts steps in which nothing is being compared.
        share: largest share of their time that compiles may take.
    """

    def __init__(self, costs_ns: Mapping[Variant, int], *, budget: CompileBudget, share: float) -> None:
        self._costs_ns = dict(costs_ns)
        self._budget = budget
        self._share = share

    @property
    def awaited(self) -> Set[Variant]:
        """Variants that are still to compile."""
        return self._costs_ns.keys()

    def take_due(self) -> Variant | None:
        """Return the variant that may compile in the step that begins; None if none may yet, or all have."""
        if not self._costs_ns:
            return None
        self._budget.note_step()
        variant, cost_ns = next(iter(self._costs_ns.items()))
        if not self._budget.allows(cost_ns, self._share):
            return None
        del self._costs_ns[variant]
        return variant

    def leave_out(self, variants: Collection[str]) -> None:
        """Wait for none of these variants, since they have been compared."""
        self._costs_ns = {variant: cost for variant, cost in self._costs_ns.items() if variant not in variants}

    def spend(self, ns: int) -> None:
        """Note how long a step waited for a compile."""
        self._budget.spend(ns)
