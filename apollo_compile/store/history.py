"""What earlier processes found out about a graph, so that the next one begins where they ended.

    History(directory).recall(key) -> Finding | None;    keep(key, finding)
    History(directory).generation(name) -> int;          begin_generation(name)

A training run that is started again plans the same graphs, measures the same bodies and compares the same variants. Its
finding per graph is a file: the plan, the measured durations that the plan was made from, and which variant won. A plan
that comes from there is not planned again, and a variant that won runs from the first step on; the others are not even
compiled.

A finding is forgotten after `MAX_AGE_S`, because a machine changes in ways that no key shows, and the `MAX_FILES`
youngest are kept. One that cannot be read, or whose plan is not legal for the graph, is as if it were not there.

AOTAutograd's cache keeps bundles of graphs (`session/bundle.py`), and cannot be told that one is wrong. So the number
of a generation is part of their key there, and a new one begins when a bundle could not be used.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from apollo_compile.ir import Observations, Plan, Variant, Verdict
from apollo_compile.store.files import MAX_AGE_S, Dated, FileFormat, FileState, Store

_logger = logging.getLogger(__name__)

MAX_FILES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is known about one graph."""

    observations: Observations
    """What the plan was made from."""
    plan: Plan
    variant: Variant
    """How it ran when autotuning of its model was over."""
    verdict: Verdict | None
    """What autotuning said; None if there was nothing to compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _FindingFile(Dated):
    finding: Finding


_FINDINGS = FileFormat(kind="finding", number=3, content=_FindingFile, max_bytes=64 * 2**20, indent=None)
"""A plan of 10,000 segments takes about 2 MB."""


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
        """Return what was found, unless that is too long ago."""
        found = self._findings.read(key)
        if found.state is FileState.DAMAGED:
            path = self._findings.path(key)
            _logger.info("what an earlier run found out is not used, and found out anew: %s: %s", path, found.detail)
        return None if found.content is None else found.content.finding

    def keep(self, key: str, finding: Finding) -> None:
        """Write a finding; where that is impossible, the next process finds it out again."""
        try:
            self._findings.write(key, _FindingFile(made_at=time.time(), finding=finding))
        except OSError as error:
            _logger.info("what was found out about a graph is not kept: %s", error)

    def generation(self, name: str) -> int:
        """Return the number of the bundles of that name that are right."""
        found = self._generations.read(name).content
        return 0 if found is None else found.generation

    def begin_generation(self, name: str) -> None:
        """Let bundles of that name be made anew by the next process that wants them."""
        try:
            self._generations.update(name, _next_generation)
        except OSError as error:
            _logger.info("graphs that AOTAutograd's cache has are compiled anew every time: %s", error)


def _next_generation(before: _GenerationFile | None) -> _GenerationFile:
    return _GenerationFile(generation=1 if before is None else before.generation + 1)
