"""What is worth comparing in steps, by dependencies and by times of the device.

reason_without_branches(compilation)   why no plan can be faster, whatever bodies take
reason_against_lanes(graphs)        why no plan is worth comparing, by what bodies take
"""

from __future__ import annotations

from collections.abc import Sequence

from apollo_compile.pipeline import Compilation
from apollo_compile.reports.summary import critical_path
from apollo_compile.session.contest.rival_graph import RivalGraph
from apollo_compile.units import format_ns

LEAST_PROMISE = 1.05
"""How much faster than the whole graph a plan must be able to be for its bodies to be compiled, and to be compared."""


def reason_without_branches(first: Compilation) -> str | None:
    """Return why no plan can be faster; None if there are branches to run side by side.

    That is a matter of the forward, the `first` graph: in every backward, gradients of weights are independent of all
    else.
    """
    fastest = [min(mode.duration_ns for mode in modes) for modes in first.costs.modes]
    chain_ns = critical_path(first.partition.graph, fastest)
    if len(first.profile.lanes) > 1 and LEAST_PROMISE * chain_ns <= sum(fastest):
        return None
    return f"no two branches of {first.capture.name} are independent"


def reason_against_lanes(graphs: Sequence[RivalGraph]) -> str | None:
    """Return why no plan is worth comparing, by what bodies take."""
    if any(graph.whole_ns is None for graph in graphs):
        return "its bodies could not be timed: not all of its graphs were called in a step"
    whole_ns = sum(graph.whole_ns or 0 for graph in graphs)
    bound_ns = sum(graph.compilation.plan.lower_bound_ns for graph in graphs)
    if LEAST_PROMISE * bound_ns > whole_ns:
        return (
            f"as one CUDA graph it takes {format_ns(whole_ns)}, and no plan on lanes less than "
            f"{format_ns(bound_ns)}, by the times of its bodies"
        )
    if not any(graph.compilation.plan.uses_lanes for graph in graphs):
        return "no plan on lanes is faster by 'plan.min_gain', by the times of its bodies"
    return None
