"""Progress lines for a user who waits for a long compile.

    with Progress("compiling 0/0 forward") as progress:
        progress.at("body", 5, 14)

A compile that takes longer than `PATIENCE_S` logs one line per phase: `compiling 0/0 forward: body 5 of 14 after 10 s`.
The level is INFO, since nothing is wrong; but the line must be seen by default, so it goes to standard error if logging
is not configured, and to the configured handlers otherwise. A level above INFO on the package's or this file's logger
switches it off, as `APOLLO_LOG=WARNING` does. Local ranks mostly compile the same, so only the first one logs.
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
    """Tracks the phase of one compile, and logs it if the compile takes long; a timer thread checks that.

    Arguments:
        what: description of the compile, for the line.
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
        """Guards the phase and the phases that were logged."""
        self._timer = threading.Timer(PATIENCE_S, self.look)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        """Start the timer."""
        with contextlib.suppress(RuntimeError):  # if no thread can be started, `at` checks the time
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def at(self, phase: str, number: int = 0, count: int = 0) -> None:
        """Record the current phase, and the number of the step and of all steps, if known."""
        with self._lock:
            self._phase, self._step = phase, f" {number} of {count}" if count else ""
        self.look()

    def look(self) -> None:
        """Log the phase, if the compile has taken long and the phase was not logged yet."""
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
