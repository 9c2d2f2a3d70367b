"""Results of self-checks of lanes on a GPU with its driver and torch, shared by the processes of a machine.

    SelfChecks(directory).read(fingerprint)          the stored result, or why there is no valid one
    SelfChecks(directory).find(fingerprint, make)    the stored result; made and stored if there is none

There is one file per kind of GPU. It is valid for one driver and torch, and for one format, whose number is raised when
the check changes. A failed check is repeated after `RETRY_S`, since a busy machine may have caused the failure.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from apollo_compile.store.files import Dated, FileFormat, FileState, Found, Store
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.fingerprint import Fingerprint, describe_changes

_logger = logging.getLogger(__name__)

RETRY_S = 24 * 3600
"""Age at which the result of a failed check expires."""

WAIT_S = 200.0
"""Longest wait for the check of another process, such as another rank of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheck(Dated):
    """Result of a self-check, with the fingerprint of the GPU."""

    fingerprint: Fingerprint
    results: tuple[CheckResult, ...]

    @property
    def complaint(self) -> str | None:
        """First error; None if there is none."""
        errors = (each for each in self.results if each.level is Level.ERROR)
        return next((f"{each.subject}: {each.message}" for each in errors), None)


FORMAT = FileFormat(kind="self-check of a GPU", number=2, content=SelfCheck, max_bytes=2**20)


class SelfChecks:
    """Results of self-checks in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store = Store(directory, FORMAT, names="self-check-{key}.json")

    def read(self, fingerprint: Fingerprint) -> Found[SelfCheck]:
        """Return the result for a GPU with this fingerprint. Raises nothing."""
        found = self._store.read(_key_of(fingerprint))
        if found.content is None:
            return found
        if changes := describe_changes(found.content.fingerprint, fingerprint):
            return Found(state=FileState.STALE, detail=changes)
        age_s = time.time() - found.content.made_at
        if found.content.complaint is not None and not 0 <= age_s <= RETRY_S:
            return Found(state=FileState.STALE, detail=f"it failed {age_s:.0f} s ago, and is repeated")
        return found

    def find(self, fingerprint: Fingerprint, make: Callable[[], SelfCheck], *, again: bool = False) -> SelfCheck:
        """Return the stored result; if there is no valid one, or with `again`, make and store one.

        Other processes that need the result wait for it.
        """
        kept = None if again else self.read(fingerprint).content
        if kept is not None:
            return kept
        with self._alone():
            kept = None if again else self.read(fingerprint).content  # another process may have made it meanwhile
            if kept is not None:
                return kept
            made = make()
            try:
                self._store.write(_key_of(fingerprint), made)
            except OSError as error:
                _logger.info("the self-check is not kept: %s; the next process checks this GPU again", error)
            return made

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of self-checks, if files can be locked."""
        from filelock import FileLock, Timeout  # slow to import (asyncio), and most processes find a result

        lock = FileLock(self._directory / ".self-check.lock", timeout=WAIT_S, poll_interval=0.05)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, Timeout) as error:
            _logger.info("the self-check runs without a lock: %s", error)
        try:
            yield
        finally:
            lock.release()


def _key_of(fingerprint: Fingerprint) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in fingerprint.device)
    return f"{name}-{fingerprint.units}"
