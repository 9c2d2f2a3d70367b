"""Selected variants of Dynamo graphs on a GPU, so that the next process need not compare again.

    Verdicts(directory).recall(key) -> Choice | None;    keep(key, choice)

`history.py` keeps plans and measurements of the graphs after AOTAutograd. A Dynamo graph may run without any of them,
compiled by torch.compile.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from apollo_compile.ir import Verdict
from apollo_compile.store.files import MAX_AGE_S, Dated, FileFormat, FileState, Store

_logger = logging.getLogger(__name__)

MAX_FILES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Result of a comparison, and the reason why it left variants out."""

    verdict: Verdict | None
    """Verdict; None if no variants were compared."""
    reason: str = ""
    """Reason why the comparison left variants out; empty if it had all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChoiceFile(Dated):
    choice: Choice


_CHOICES = FileFormat(kind="choice", number=4, content=_ChoiceFile, max_bytes=2**20)


class Verdicts:
    """Choices in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory, _CHOICES, max_age_s=MAX_AGE_S, max_files=MAX_FILES)

    def recall(self, key: str) -> Choice | None:
        """Return a choice; None if there is none, or it is too old or damaged."""
        found = self._store.read(key)
        if found.state is FileState.DAMAGED:
            _logger.info("the variants of a graph are compared again: %s: %s", self._store.path(key), found.detail)
        return None if found.content is None else found.content.choice

    def keep(self, key: str, choice: Choice) -> None:
        """Write a choice; if that fails, log it, and the next process compares again."""
        try:
            self._store.write(key, _ChoiceFile(made_at=time.time(), choice=choice))
        except OSError as error:
            _logger.info("the selected variant of a graph is not kept: %s; the next process compares again", error)
