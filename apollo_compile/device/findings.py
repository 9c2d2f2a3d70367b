"""What was found out about a machine, and how bad it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Works, and could be better; or could not be looked at."""
    WARNING = "warning"
    """Works, but not as one would think."""
    ERROR = "error"
    """Does not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    message: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""
