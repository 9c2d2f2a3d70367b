"""What one graph decides in common with the other ranks: who multiplies, its first plan and every later one.

    Commons(ranks).enroll(compilation);  Commons.settle(proposed, own) -> Compilation | None
    Commons.settle_names(subject, names) -> names

`ranks.py` knows texts under topics; here a text is a list of names, or a plan with the costs that it was made
from. Note [What ranks agree on] in `ranks.py` says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from apollo_compile.json_form import from_json, to_json
from apollo_compile.observe import StageRunner
from apollo_compile.pipeline import Compilation, Decision, adopt_decision
from apollo_compile.plan_file import fingerprint
from apollo_compile.ranks import Ranks

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Commons:
    """What one graph and the other ranks settle."""

    ranks: Ranks
    topic: str = ""
    """Name of the graph among the ranks."""
    num_settled: int = 0

    def enroll(self, compilation: Compilation) -> None:
        """Name the graph by its segments and lanes."""
        if not self.ranks.is_alone:
            graph, units = fingerprint(compilation.partition.graph), compilation.profile.units
            self.topic = self.ranks.enroll(graph, compilation.capture.name, units=units)

    def settle(self, proposed: Compilation | None, own: Compilation, runner: StageRunner) -> Compilation | None:
        """Return what all ranks run from now on; None is to keep `own`, which is of the same segments.

        A plan that is not legal here is a WARNING, and the proposal stands.
        """
        if self.ranks.is_alone:
            return proposed
        decision = None if proposed is None else Decision(costs=proposed.costs, plan=proposed.plan)
        proposal = json.dumps(to_json(decision))
        settled = self.ranks.settle(f"{self.topic}/plan {self.num_settled}", proposal)
        self.num_settled += 1
        if settled == proposal:
            return proposed
        try:
            content = json.loads(settled)
            return None if content is None else adopt_decision(own, from_json(Decision, content), runner=runner)
        except Exception as error:  # whatever another version of us wrote there
            _logger.warning(
                "%s does not take the plan of another rank: %s: %s", own.capture.name, type(error).__name__, error
            )
            return proposed

    def settle_names(self, subject: str, names: Iterable[str]) -> frozenset[str]:
        """Return what all ranks take for `names`: none where the graph has no name among the ranks."""
        own = frozenset(names)
        if self.ranks.is_alone:
            return own
        if not self.topic:
            return frozenset()
        settled = self.ranks.settle(f"{self.topic}/{subject}", json.dumps(sorted(own)))
        try:
            return frozenset(from_json(_Names, {"names": json.loads(settled)}).names)
        except ValueError as error:  # whatever another version of us wrote there
            _logger.warning("%s of another rank are not taken: %s", subject, error)
            return own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    names: tuple[str, ...]
