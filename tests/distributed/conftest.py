"""How long every scenario of the ranks took, at the end of what pytest prints."""

from __future__ import annotations

import pytest

DURATIONS: pytest.StashKey[list[tuple[str, float]]] = pytest.StashKey()
"""Name and seconds, on the slower rank."""


def pytest_configure(config: pytest.Config) -> None:
    """Begin with none."""
    config.stash.setdefault(DURATIONS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print them."""
    durations = config.stash.get(DURATIONS, [])
    if durations:
        terminalreporter.section("scenarios of several ranks")
    for name, seconds in durations:
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
