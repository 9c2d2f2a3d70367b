"""What a compile is at, for a user who waits for it.

    with Progress("compiling 0/0 forward") as progress:
        progress.at("body", 5, 14)

A compile that takes no longer than `PATIENCE_S` says nothing. One that does says, once per phase, what it is at:
`compiling 0/0 forward: body 5 of 14 after 10 s`. That is nothing to worry about, and so INFO; but an INFO that
nobody sees would help nobody, so it goes to standard error where logging was not set up. Where it was, it goes where
all else goes. A level above INFO of the package's logger switches it off, as `APOLLO_LOG=WARNING` does, and so does one
of this file's. Of several ranks on a machine, which mostly compile the same, the first one speaks.
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
    """Knows what one compile is at, and says so where it takes long; a thread looks when it has become long.

    Arguments:
        what: what goes on, for the line.
        clock: returns seconds.
    """

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._begin = clock()
        self._phase: str | None = None
        self._step = ""
        self._told: set[str] = set()
        self._lock = threading.Lock()
        """Guards what it is at and what was told."""
        self._timer = threading.Timer(PATIENCE_S, self.look)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        """Begin to look."""
        with contextlib.suppress(RuntimeError):  # where no thread can be started, `at` looks
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Look no more."""
        self._timer.cancel()

    def at(self, phase: str, number: int = 0, count: int = 0) -> None:
        """Note the phase that begins or goes on, and which step of how many it is, if that is known."""
        with self._lock:
            self._phase, self._step = phase, f" {number} of {count}" if count else ""
        self.look()

    def look(self) -> None:
        """Say what it is at, if it has taken long and this phase was not told yet."""
        with self._lock:
            elapsed_s = self._clock() - self._begin
            if self._phase is None or self._phase in self._told or elapsed_s < PATIENCE_S:
                return
            self._told.add(self._phase)
            told = f"{self._what}: {self._phase}{self._step} after {elapsed_s:.0f} s"
        _tell(told)


def _tell(line: str) -> None:
    levels = (logging.getLogger(name).level for name in (__name__, __name__.partition(".")[0]))
    level = next((level for level in levels if level != logging.NOTSET), logging.INFO)
    if level > logging.INFO or local_rank()[0] > 0:
        return
    record = _logger.makeRecord(_logger.name, logging.INFO, __file__, 0, line, (), None)
    if _logger.hasHandlers():
        _logger.handle(record)
    else:
        logging.StreamHandler().handle(record)
