"""Colours of branches, for every rendering that has colours: light enough for dark text on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apollo_compile.reports.report import Report

COLORS = ("#8fb1f5", "#f3b27f", "#7fd1ae", "#d3a4e6", "#ead06b", "#7ccbe3", "#f19fa8", "#b7cb80")
"""Used in the order in which a report names branches, and again from the first."""


def color_of_branches(report: Report) -> dict[str, int]:
    """Return the place in `COLORS` of every branch: a branch has the same colour in all graphs."""
    branches = dict.fromkeys(branch for graph in report.graphs for branch in graph.branches)
    return {branch: index % len(COLORS) for index, branch in enumerate(branches)}
