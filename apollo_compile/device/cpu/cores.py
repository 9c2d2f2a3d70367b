"""Which of the machine's cores belong to this process, where a launcher started several that share them.

    divide_cores(allowed, launchers, rank, size) -> CoreShare

Lanes are pinned, so two processes that counted the same cores would put their lanes on top of each other. A launcher
tells every process its number among those on the machine and how many there are (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`).

* A process with another core mask than its parent's was bound on purpose (numactl, `--cpu-bind`): its mask is its own.
* Else the ranks have one mask in common: each gets an equal, contiguous part of it, at least one core.

Contiguous, since neighbours in number mostly share a cache or a socket. The cores of other ranks come behind the own
ones, for those who ask for more with `device.units`.

    core_topology(cores) -> one tuple per core

says how cores lie to each other: two threads of one core are worth less than two cores.
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
    """Every core that it may run on, its own ones first."""
    num_own: int
    rank: int = 0
    """Among the processes of a launcher on this machine."""
    size: int = 1
    """How many they are."""

    @property
    def own(self) -> tuple[int, ...]:
        """The cores that no other rank has."""
        return self.order[: self.num_own]


def divide_cores(allowed: Sequence[int], launchers: Sequence[int] | None, rank: int, size: int) -> CoreShare:
    """Return the share of `rank` among `size` processes.

    Arguments:
        allowed: cores that this process may run on, ascending.
        launchers: those of its parent; None where they cannot be known, which counts as the same.
        rank: number of this process on this machine.
        size: how many there are.
    """
    if size == 1 or (launchers is not None and sorted(launchers) != sorted(allowed)):
        return CoreShare(order=tuple(allowed), num_own=len(allowed), rank=rank, size=size)
    count = len(allowed)
    begin = rank * count // size if size <= count else rank % count
    end = max(begin + 1, (rank + 1) * count // size) if size <= count else begin + 1
    order = (*allowed[begin:], *allowed[:begin])
    return CoreShare(order=order, num_own=end - begin, rank=rank, size=size)


def share_cores(allowed: Sequence[int]) -> CoreShare:
    """Return the share of this process in the cores that it may run on, ascending."""
    rank, size = local_rank()
    return divide_cores(allowed, _launchers_cores() if size > 1 else None, rank, size)


def _launchers_cores() -> list[int] | None:
    try:
        return sorted(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # another system, or the parent has gone
        return None


_SHARED = ("topology/core_cpus_list", "cache/index3/shared_cpu_list", "topology/physical_package_id")
"""What cores may have in common: the physical core, the last cache, the socket."""


def core_topology(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> tuple[tuple[int, ...], ...]:
    """Return for every core which physical core, last cache and socket it is on; the same for cores that lie alike.

    They are numbered in the order of `cores`. What the system does not tell counts as shared by all.
    """
    told = [[_read(root / f"cpu{core}" / name) for core in cores] for name in _SHARED]
    numbered = [[list(dict.fromkeys(texts)).index(text) for text in texts] for texts in told]
    return tuple(zip(*numbered, strict=True))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or one that hides it
        return ""
