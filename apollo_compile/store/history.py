"""Findings about graphs, which the next process reuses.

    History(directory).recall(key) -> Finding | None;    keep(key, finding)
    History(directory).generation(name) -> int;          begin_generation(name)

A restarted training run plans the same graphs, measures the same bodies and compares the same variants. So each graph
has a file with its finding: the plan, the measured durations that it was made from, and the variant that won. A
recalled plan is not planned again, and the winner runs from the first step on; variants that were close to it are
compared again, and others are not even compiled.

A finding expires after `MAX_AGE_S`, because a machine changes in ways that no key captures, and only the `MAX_FILES`
youngest are kept. A finding that cannot be read, or whose plan is not legal for the graph, is ignored.

AOTAutograd's cache cannot invalidate a bundle of a graph (`session/restore.py`). So the number of a generation is part
of a bundle's key, and a new generation begins when a bundle could not be used.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from apollo_compile.store.files import MAX_AGE_S, Dated, FileFormat, FileState, Store
from apollo_compile.target.compilation import Finding

_logger = logging.getLogger(__name__)

MAX_FILES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class _FindingFile(Dated):
    finding: Finding


_FINDINGS = FileFormat(kind="finding", number=5, content=_FindingFile, max_bytes=64 * 2**20, indent=None)
"""File format of findings; a plan of 10,000 segments takes about 2 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _GenerationFile:
    generation: int


_GENERATIONS = FileFormat(kind="generation", number=1, content=_GenerationFile, max_bytes=1024)


class History:
    """Findings, and generations of bundles, in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._findings = Store(directory, _FINDINGS, max_age_s=MAX_AGE_S, max_files=MAX_FILES)
        self._generations = Store(directory, _GENERATIONS, names="{key}.generation", max_files=MAX_FILES)

    def recall(self, key: str) -> Finding | None:
        """Return a finding; None if there is none, or it is too old or damaged."""
        found = self._findings.read(key)
        if found.state is FileState.DAMAGED:
            path = self._findings.path(key)
            _logger.info("an earlier process's plan and measurements are ignored: %s: %s", path, found.detail)
        return None if found.content is None else found.content.finding

    def keep(self, key: str, finding: Finding) -> None:
        """Write a finding; if that fails, log it, and the next process measures again."""
        try:
            self._findings.write(key, _FindingFile(made_at=time.time(), finding=finding))
        except OSError as error:
            _logger.info("a graph's plan and measurements are not kept: %s; the next process measures again", error)

    def generation(self, name: str) -> int:
        """Return the current generation of the bundles with this name."""
        found = self._generations.read(name).content
        return 0 if found is None else found.generation

    def begin_generation(self, name: str) -> None:
        """Invalidate all bundles with this name; later processes make new ones."""
        try:
            self._generations.update(name, _next_generation)
        except OSError as error:
            _logger.info("a bundle in AOTAutograd's cache is not invalidated, so every process recompiles: %s", error)


def _next_generation(before: _GenerationFile | None) -> _GenerationFile:
    return _GenerationFile(generation=1 if before is None else before.generation + 1)
