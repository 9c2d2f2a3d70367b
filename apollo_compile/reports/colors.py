"""Colours of branches, for every rendering that has colours: light enough for dark text on them."""

from __future__ import annotations

COLORS = ("#8fb1f5", "#f3b27f", "#7fd1ae", "#d3a4e6", "#ead06b", "#7ccbe3", "#f19fa8", "#b7cb80")
"""Used in the order of a graph's branches, and again from the first."""
