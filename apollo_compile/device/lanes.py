"""The lane catalogue: the few lanes that a program on a device may use.

    lane_catalogue(units, atoms) -> lanes
    atom_borders(atoms)          -> where they begin, and where the last one ends

Lane 0 has every unit. Then come the lanes of the splits: two halves, and three quarters beside one quarter. Lanes of
different splits overlap; a plan orders the segments on them, so they never run at the same time. A short catalogue
costs little: plans from 3 to 14 lanes differ by a few percent, and every lane is a thread that somebody has to keep.

A GPU gives its units out in atoms of several, not all of the same size: an H200 has 14 of 8 SMs and one of 20. Then a
split is where atoms meet, and atom `i` has the units that follow those of the atoms before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from apollo_compile.ir import Lane, LaneId


def lane_catalogue(units: int, atoms: Sequence[int] | None = None) -> tuple[Lane, ...]:
    """Return the lanes of a device with `units` units; no two have the same units.

    `atoms` are the units of every atom, which may be fewer than all together; None is one each.
    """
    borders = atom_borders((1,) * units if atoms is None else atoms)
    if units < 1 or min(atoms or (1,)) < 1 or borders[-1] > units:
        raise ValueError(
            f"a device of {units} units cannot have atoms of {atoms} units: expected at least 1 unit, and atoms of at "
            "least 1 that fit into them; check the device profile"
        )
    ranges, end = [(0, units)], borders[-1]
    inner = range(1, len(borders) - 1)
    if len(borders) > 2:
        half = min(inner, key=lambda index: (abs(2 * borders[index] - end), -index))
        ranges += [(0, borders[half]), (borders[half], end)]
    if len(borders) > 4:
        most = min(inner, key=lambda index: (abs(4 * borders[index] - 3 * end), index % 2))
        ranges += [(0, borders[most]), (borders[most], end)]
    return tuple(
        Lane(id=LaneId(index), units=tuple(range(first, last)))
        for index, (first, last) in enumerate(dict.fromkeys(ranges))
    )


def atom_borders(atoms: Iterable[int]) -> list[int]:
    """Return the first unit of every atom, and the unit behind the last, given the units of each."""
    return [0, *itertools.accumulate(atoms)]
