"""Progress of a long compile.

    with Progress("compiling 0/0 forward") as progress:
        progress.at("body", 5, 14)

A compile that takes longer than `PATIENCE_S` logs a line for each phase and every `PATIENCE_S`: `compiling 0/0 forward:
body 5 of 14 after 10 s of about 60 s`, with the second time if it is known. The level is INFO, but the line must be
visible by default, so it goes to standard error if logging is not configured, and to the configured handlers otherwise.
A level above INFO on the package's or this file's logger disables it, as `APOLLO_LOG=WARNING` does. Local ranks mostly
compile the same graphs, so only the first one shows progress.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from apollo_compile.config import local_rank

_logger = logging.getLogger(__name__)

PATIENCE_S = 10.0


class Progress:
    """Tracks the phase of one compile, and shows it if the compile takes long; a thread checks the time.

    Arguments:
        what: description of the compile, for the line.
        expected_ns: expected duration; 0 if unknown.
        clock: returns seconds.
    """

    def __init__(self, what: str, *, expected_ns: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._expected_s = expected_ns / 1e9
        self._clock = clock
        self._begin = clock()
        self._phase: str | None = None
        self._number = self._count = 0
        self._shown: set[str] = set()
        self._shown_s = self._begin
        """Time of the latest line."""
        self._lock = threading.Lock()
        """Guards the phase, and the phases that were logged."""
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="apollo-progress", daemon=True)

    def __enter__(self) -> Progress:
        """Start the thread that checks the time."""
        with contextlib.suppress(RuntimeError):  # if no thread can be started, `at` checks the time
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the thread."""
        self._has_ended.set()
        with self._lock:
            self._phase = None

    def at(self, phase: str, number: int = 0, count: int = 0) -> None:
        """Set the current phase, with the number of its step and of all its steps, if known."""
        with self._lock:
            self._phase, self._number, self._count = phase, number, count
        self.look()

    def look(self) -> None:
        """Show the phase if the compile takes long and the phase has no recent line."""
        with self._lock:
            now_s = self._clock()
            elapsed_s = now_s - self._begin
            if self._phase is None or elapsed_s < PATIENCE_S or not _is_wanted():
                return
            if self._phase not in self._shown or now_s - self._shown_s >= PATIENCE_S:
                self._shown.add(self._phase)
                self._shown_s = now_s
                step = f" {self._number} of {self._count}" if self._count else ""
                of = f" of about {self._expected_s:.0f} s" if elapsed_s < self._expected_s else ""
                _tell(f"{self._what}: {self._phase}{step} after {elapsed_s:.0f} s{of}")

    def _watch(self) -> None:
        while not self._has_ended.wait(PATIENCE_S):
            self.look()


def _is_wanted() -> bool:
    """Whether this is the first local rank, and the level of the package's or this file's logger is at most INFO."""
    levels = (logging.getLogger(name).level for name in (__name__, __name__.partition(".")[0]))
    level = next((level for level in levels if level != logging.NOTSET), logging.INFO)
    return level <= logging.INFO and local_rank()[0] == 0


def _tell(line: str) -> None:
    record = _logger.makeRecord(_logger.name, logging.INFO, __file__, 0, line, (), None)
    if _logger.hasHandlers():
        _logger.handle(record)
    else:
        logging.StreamHandler().handle(record)
