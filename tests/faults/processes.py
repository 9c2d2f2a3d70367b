"""Whether other processes are there still."""

from __future__ import annotations

import os
import time
from pathlib import Path

PATIENCE_S = 300


def is_alive(pid: int) -> bool:
    """Whether it runs; an orphan that nobody waits for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for_end(pid: int) -> None:
    """Return when a process that is no child of this one has ended; fail if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)
