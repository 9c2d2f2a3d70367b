"""Division of a machine's cores among the ranks that a launcher started on it; core topology.

    divide_cores(allowed, launchers, rank, size) -> CoreShare

Lanes are pinned, so without a division, lanes of several processes would be pinned to the same cores. A launcher sets
the local rank and the number of local ranks of every process (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`).

* A process whose core mask differs from its parent's was bound on purpose (numactl, `--cpu-bind`): it owns its mask.
* Otherwise the ranks share one mask: each gets an equal, contiguous part of it, at least one core.

Parts are contiguous, since cores with adjacent numbers mostly share a cache or a socket. The cores of other ranks
follow the rank's own cores, for users who request more with `device.units`.

    core_topology(cores) -> one tuple per core: the numbers of its physical core, last-level cache and socket
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apollo_compile.config import local_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreShare:
    """The cores of one process."""

    order: tuple[int, ...]
    """Every core that the process may run on, its own cores first."""
    num_own: int
    rank: int = 0
    """Local rank."""
    size: int = 1
    """Number of local ranks."""

    @property
    def own(self) -> tuple[int, ...]:
        """The cores that belong to this rank alone."""
        return self.order[: self.num_own]


def divide_cores(allowed: Sequence[int], launchers: Sequence[int] | None, rank: int, size: int) -> CoreShare:
    """Return the share of `rank` among `size` processes.

    Arguments:
        allowed: cores that this process may run on, ascending.
        launchers: the cores of its parent; None if unknown, which is treated as the same cores.
        rank: local rank of this process.
        size: number of local ranks.
    """
    if size == 1 or (launchers is not None and sorted(launchers) != sorted(allowed)):
        return CoreShare(order=tuple(allowed), num_own=len(allowed), rank=rank, size=size)
    count = len(allowed)
    begin = rank * count // size if size <= count else rank % count
    end = max(begin + 1, (rank + 1) * count // size) if size <= count else begin + 1
    order = (*allowed[begin:], *allowed[:begin])
    return CoreShare(order=order, num_own=end - begin, rank=rank, size=size)


def share_cores(allowed: Sequence[int]) -> CoreShare:
    """Return this process's share of the cores that it may run on (`allowed`, ascending)."""
    rank, size = local_rank()
    return divide_cores(allowed, _launchers_cores() if size > 1 else None, rank, size)


def _launchers_cores() -> list[int] | None:
    """Return the cores of the parent process; None if unknown."""
    try:
        return sorted(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # not Linux, or the parent has ended
        return None


_SHARED = ("topology/core_cpus_list", "cache/index3/shared_cpu_list", "topology/physical_package_id")
"""Files of the parts that cores may share: the physical core, the last-level cache, the socket."""


def core_topology(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> tuple[tuple[int, ...], ...]:
    """Return, for every core, the numbers of its physical core, last-level cache and socket.

    Numbers are assigned in the order of `cores`, so equal topologies give equal results. A part that the system does
    not report counts as shared by all cores.
    """
    sharing = [[_read(root / f"cpu{core}" / name) for core in cores] for name in _SHARED]
    numbered = [[list(dict.fromkeys(texts)).index(text) for text in texts] for texts in sharing]
    return tuple(zip(*numbered, strict=True))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or hidden by a sandbox
        return ""
