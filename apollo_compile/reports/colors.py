"""Colours of branches for all renderings, light enough for dark text on them."""

from __future__ import annotations

from apollo_compile.reports.values import ModelSummary

COLORS = ("#8fb1f5", "#f3b27f", "#7fd1ae", "#d3a4e6", "#ead06b", "#7ccbe3", "#f19fa8", "#b7cb80")
"""Colours in the order of use; most graphs have no more branches."""


def color_of_branches(report: ModelSummary) -> tuple[dict[str, int], ...]:
    """Return, per graph, the index in `COLORS` of every branch.

    Branches of one graph have different colours, unless there are more branches than colours; if possible, a branch has
    the same colour as in earlier graphs.
    """
    known: dict[str, int] = {}
    found = []
    for graph in report.graphs:
        own: dict[str, int] = {}
        for branch in graph.branches:
            if branch in known and known[branch] not in own.values():
                own[branch] = known[branch]
        for branch in graph.branches:
            if branch not in own:
                free = [color for color in range(len(COLORS)) if color not in own.values()] or [len(own) % len(COLORS)]
                own[branch] = min(free, key=lambda color: color in known.values())
                known.setdefault(branch, own[branch])
        found.append(own)
    return tuple(found)
