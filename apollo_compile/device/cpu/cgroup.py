"""CPU time and memory that Linux grants to the process, by control groups as in containers and batch jobs.

    granted_cores() -> CPU time in cores, or None if there is no limit
    free_bytes() -> memory that the process may still take, or None if that is not known

The limits of all parent groups count, too, and both versions of the interface may be present. A file that is missing or
cannot be read means no limit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")

_TIME, _TIME_V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY, _MEMORY_V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def granted_cores() -> float | None:
    """Return the granted CPU time in cores; None if there is no limit."""
    limits = _numbers_of_groups("cpu", _TIME, _TIME_V1)
    return min((quota / period for quota, period in limits if quota > 0 and period), default=None)


def free_bytes() -> int | None:
    """Return the bytes of memory that the process may still take without swapping; None if that is not known."""
    free = [max(0, limit - used) for limit, used in _numbers_of_groups("memory", _MEMORY, _MEMORY_V1)]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        available = re.search(r"MemAvailable:\s*(\d+) kB", MEMORY.read_text(encoding="utf-8"))
        free += [] if available is None else [1024 * int(available[1])]
    return min(free, default=None)


def _numbers_of_groups(controller: str, files: tuple[str, ...], files_v1: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield the two numbers that such files of the process's groups have, and those of their parents."""
    lines = ["0::/", f"1:{controller}:/"]  # a container sees its own group as the root
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines += MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from _numbers(ROOT, path, files)
        elif controller in controllers.split(","):
            yield from _numbers(ROOT / controller, path, files_v1)


def _numbers(root: Path, path: str, files: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of a group and all its parents; "max" means no limit."""
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):
            first, second = " ".join((root / group / file).read_text(encoding="utf-8") for file in files).split()
            yield int(first), int(second)
