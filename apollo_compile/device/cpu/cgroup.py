"""CPU time and memory that Linux grants to the process, by control groups as in containers and batch jobs.

    granted_cores() -> CPU time in cores, or None if there is no limit
    free_bytes() -> memory that the process may still take, or None if that is not known

The limits of all parent groups count, too, and both versions of the interface may be present. A file that is missing or
cannot be read means no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")


def granted_cores() -> float | None:
    """Return the granted CPU time in cores; None if there is no limit."""
    return min(_granted(), default=None)


def free_bytes() -> int | None:
    """Return the bytes of memory that the process may still take without swapping; None if that is not known."""
    free = list(_free())
    with contextlib.suppress(OSError, UnicodeDecodeError):
        free += [1024 * kib for kib in _named_numbers(MEMORY, "MemAvailable:")]
    return min(free, default=None)


def _granted() -> Iterator[float]:
    for group, is_second in _groups("cpu"):
        files = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max" and negative quotas mean no limit
            quota, period = map(int, " ".join(_read(group / file) for file in files).split())
            if quota > 0:
                yield quota / period


def _free() -> Iterator[int]:
    """Yield what every group leaves; files that it cached and has not used lately make room for others."""
    for group, is_second in _groups("memory"):
        limit, used = ("max", "current") if is_second else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):
            left = int(_read(group / f"memory.{limit}")) - int(_read(group / f"memory.{used}"))
            cached = _named_numbers(group / "memory.stat", "inactive_file" if is_second else "total_inactive_file")
            yield max(0, left + sum(cached))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of the groups of this process and their parents; and whether they are of version 2."""
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


def _named_numbers(file: Path, name: str) -> list[int]:
    """Return the numbers behind a name at the beginning of a line."""
    lines = (line.split() for line in _read(file).splitlines())
    return [int(words[1]) for words in lines if len(words) > 1 and words[0] == name]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")
