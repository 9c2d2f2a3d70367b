"""The lane catalogue: the few lanes that a program on a device may use.

    lane_catalogue(units, atoms) -> lanes
    atom_borders(atoms)          -> the first unit of every atom, and the end of the last

Lane 0 has every unit. The other lanes come from two splits: two halves, and three quarters beside one quarter. Lanes of
different splits share units; a plan orders their segments so that they never run at the same time. A short catalogue
costs little: plans from 3 to 14 lanes differ by a few percent, and every lane is a thread to keep.

A GPU assigns its units in atoms of several SMs, not all of the same size: an H200 has 14 of 8 SMs and one of 20. Splits
are at borders between atoms, and atoms are numbered in the order of their units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from apollo_compile.ir import Lane, LaneId


def lane_catalogue(units: int, atoms: Sequence[int] | None = None) -> tuple[Lane, ...]:
    """Return the lanes of a device with `units` units; no two have the same units.

    `atoms` has the number of units in every atom, which may add up to less than `units`; None means one unit each.
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
    """Return the first unit of every atom, and the unit after the last atom, given the sizes of the atoms."""
    return [0, *itertools.accumulate(atoms)]
