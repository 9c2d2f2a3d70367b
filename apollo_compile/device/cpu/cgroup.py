"""How much time of its cores the process may use, as the control groups of Linux grant it to containers and jobs.

    granted_cores() -> cores' worth of time, or None where there is no limit

Every group above the process's own counts, and both versions of the interface may be there at once. A file that is
missing or cannot be read limits nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def granted_cores() -> float | None:
    """Return how many cores' worth of time the process is granted; None where there is no limit."""
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
    """Yield the quotas, in periods, of a group and all above it; "max" or a negative one is none."""
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            text = " ".join((root / group / file).read_text(encoding="utf-8") for file in files)
            quota, period = map(int, text.split())
            if quota > 0:
                yield quota / period
