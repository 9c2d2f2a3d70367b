"""Measured gains of oneDNN over BLAS, per matmul, shared by the processes of a machine.

    MatmulGains(directory).recall(fingerprint) -> gains by the name of a matmul
    MatmulGains(directory).add(fingerprint, gains) -> gains, merged with those of other processes

A gain is BLAS's time over oneDNN's. There is one file per number of cores. It expires as a whole, `MAX_AGE_S` after its
first entry was measured, or when the fingerprint of the machine changes; the `MAX_ENTRIES` youngest entries are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from apollo_compile.store.files import MAX_AGE_S, Dated, FileFormat, FileState, Store
from apollo_compile.target.fingerprint import Fingerprint

_logger = logging.getLogger(__name__)

MAX_ENTRIES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _GainsFile(Dated):
    fingerprint: Fingerprint
    gains: Mapping[str, float]
    """Gains by name of a matmul, the youngest last."""


_FORMAT = FileFormat(kind="file of matmul gains", number=1, content=_GainsFile, max_bytes=2**20)


class MatmulGains:
    """Measured gains in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory, _FORMAT, names="matmul-{key}.json", max_age_s=MAX_AGE_S)

    def recall(self, fingerprint: Fingerprint) -> Mapping[str, float]:
        """Return the gains measured on the machine and number of cores in `fingerprint`."""
        key = _key_of(fingerprint)
        found = self._store.read(key)
        if found.state is FileState.DAMAGED:
            _logger.info("matmuls are measured again: %s: %s", self._store.path(key), found.detail)
        return found.content.gains if found.content is not None and found.content.fingerprint == fingerprint else {}

    def add(self, fingerprint: Fingerprint, gains: Mapping[str, float]) -> Mapping[str, float]:
        """Add gains that were just measured; return them merged with those of other processes."""

        def change(before: _GainsFile | None) -> _GainsFile:
            if before is None or before.fingerprint != fingerprint:
                before = _GainsFile(made_at=time.time(), fingerprint=fingerprint, gains={})
            merged = [*((name, gain) for name, gain in before.gains.items() if name not in gains), *gains.items()]
            return replace(before, gains=dict(merged[-MAX_ENTRIES:]))

        try:
            return self._store.update(_key_of(fingerprint), change).gains
        except OSError as error:
            _logger.info("measured matmuls are not kept: %s; the next process measures them again", error)
            return gains


def _key_of(fingerprint: Fingerprint) -> str:
    return str(fingerprint.units)
