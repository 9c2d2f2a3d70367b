"""CPU time limits of control groups, as in containers and batch jobs.

    granted_cores() -> CPU time in cores, or None if there is no limit

Limits of parent groups apply too, and both versions of the interface may be present. A file that is missing or cannot
be read means no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def granted_cores() -> float | None:
    """Return the granted CPU time in cores; None if there is no limit."""
    return min(_granted(), default=None)


def _granted() -> Iterator[float]:
    for group, is_second in _groups("cpu"):
        files = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max" and negative quotas mean no limit
            quota, period = map(int, " ".join(_read(group / file) for file in files).split())
            if quota > 0:
                yield quota / period


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's groups and their parents, each with whether it is of version 2."""
    lines = ["0::/", f"1:{controller}:/"]  # a container sees its own group as the root
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines += _read(MEMBERSHIP).splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = Path(path.lstrip("/"))
        if number == "0" or controller in controllers.split(","):
            root = ROOT if number == "0" else ROOT / controller
            yield from ((root / group, number == "0") for group in (own, *own.parents))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")
