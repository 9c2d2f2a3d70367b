"""CPU time that Linux control groups grant to the process, as in containers and batch jobs.

    granted_cores() -> CPU time in cores, or None if there is no limit

The limits of all parent groups count, too, and both versions of the interface may be present. A file that is missing or
cannot be read means no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def granted_cores() -> float | None:
    """Return the granted CPU time in cores; None if there is no limit."""
    return min(_limits(ROOT, MEMBERSHIP), default=None)


def _limits(root: Path, membership: Path) -> Iterator[float]:
    lines = ["0::/", "1:cpu:/"]  # a container sees its own group as the root
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines += membership.read_text(encoding="utf-8").splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from _quotas(root, path, ("cpu.max",))
        elif "cpu" in controllers.split(","):
            yield from _quotas(root / "cpu", path, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _quotas(root: Path, path: str, files: tuple[str, ...]) -> Iterator[float]:
    """Yield quota over period of a group and all its parents; "max" and negative quotas mean no limit."""
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            text = " ".join((root / group / file).read_text(encoding="utf-8") for file in files)
            quota, period = map(int, text.split())
            if quota > 0:
                yield quota / period
