"""Results of checks of a machine, with their severity."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Severity of a result."""

    OK = "ok"
    NOTE = "note"
    """Works, but could be better; or could not be examined."""
    WARNING = "warning"
    """Works, but not as expected."""
    ERROR = "error"
    """Does not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check."""

    level: Level
    subject: str
    message: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""
