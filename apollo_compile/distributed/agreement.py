"""Agreement of the ranks on one graph: its plan, and which matmuls oneDNN computes.

    Agreement(ranks).enroll(compilation);  Agreement.settle(own) -> Compilation | None
    Agreement.settle_numbers(subject, numbers) -> numbers

`ranks.py` settles texts under topics; here a text is numbers by name, or a plan with its costs. Note [What ranks agree
on] in `ranks.py` has the reasons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from apollo_compile.distributed.ranks import MAX_BYTES, Ranks
from apollo_compile.json_form import from_json, to_json
from apollo_compile.observe import StageRunner
from apollo_compile.pipeline import CostedPlan, adopt_decision
from apollo_compile.store.plan_file import fingerprint
from apollo_compile.target.compilation import Compilation


@dataclass(eq=False, slots=True)
class Agreement:
    """Selects the same plans and libraries for one graph on all ranks."""

    ranks: Ranks
    topic: str = ""
    """Topic of the graph, the same on all ranks that compile it."""

    def enroll(self, compilation: Compilation) -> None:
        """Set the topic, from the graph's segments and number of units."""
        if not self.ranks.is_alone:
            graph, units = fingerprint(compilation.partition.graph), compilation.profile.units
            self.topic = self.ranks.enroll(graph, compilation.capture.name, units=units)

    def settle(self, own: Compilation, runner: StageRunner) -> Compilation | None:
        """Return the plan that all ranks run; None if it is too large for the store, so that the graph falls back.

        Arguments:
            own: the plan that this rank proposes, and its segments, which an agreed plan is applied to.
            runner: runs the stages behind the plan.

        Raises:
            RankError: the agreed plan is unknown, or not legal here.
        """
        if self.ranks.is_alone:
            return own
        proposal = json.dumps(to_json(CostedPlan(costs=own.costs, plan=own.plan)))
        if len(proposal) > MAX_BYTES:
            proposal = json.dumps(None)
        settled = self.ranks.settle(f"{self.topic}/plan", proposal)
        if settled == proposal:
            return None if settled == "null" else own
        try:
            content = json.loads(settled)
            return None if content is None else adopt_decision(own, from_json(CostedPlan, content), runner=runner)
        except Exception as error:
            name = own.capture.name
            why = f"{name} cannot run the plan that ranks agreed on: {type(error).__name__}: {error}"
            raise self.ranks.fail(why) from error

    def settle_numbers(self, subject: str, own: Mapping[str, float]) -> Mapping[str, float]:
        """Return the numbers that all ranks use instead of their own.

        Raises:
            RankError: the agreed numbers are unknown, or cannot be read.
        """
        if self.ranks.is_alone:
            return own
        settled = self.ranks.settle(f"{self.topic}/{subject}", json.dumps(own))
        try:
            return from_json(_Numbers, {"numbers": json.loads(settled)}).numbers
        except Exception as error:
            raise self.ranks.fail(f"the {subject} that ranks agreed on cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    numbers: Mapping[str, float]
