"""The lane catalogue: the few lanes that a program on a device may use.

    lane_catalogue(units, atoms)  -> lanes
    lanes_for_two(lanes)          -> the lanes for at most two segments at once
    with_network(lanes)           -> the same, and a lane without units for communication with other ranks
    atom_borders(atoms)           -> the first unit of every atom, and the end of the last

Lane 0 has every unit. The other lanes come from four splits: two halves, three quarters beside one quarter, three
thirds, four quarters. Lanes of different splits share units, or go side by side where they do not, as a half beside two
quarters; a plan orders segments on lanes that share units so that they never run at the same time. A short catalogue
costs little: plans from 3 to 14 lanes differ by a few percent where two branches run at once, and every lane is a
thread to keep.

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
    end, num_atoms = borders[-1], len(borders) - 1
    inner = range(1, num_atoms)
    splits: list[tuple[int, ...]] = []
    """Of each, the units at which lanes begin and end."""
    if num_atoms > 1:
        half = borders[min(inner, key=lambda index: (abs(2 * borders[index] - end), -index))]
        splits.append((0, half, end))
    if num_atoms > 3:
        most = borders[min(inner, key=lambda index: (abs(4 * borders[index] - 3 * end), index % 2))]
        splits.append((0, most, end))
    if num_atoms > 2:
        third, two_thirds = (
            borders[min(inner, key=lambda index: (abs(3 * borders[index] - part * end), -index))] for part in (1, 2)
        )
        splits.append((0, third, two_thirds, end))
    if num_atoms > 3:
        quarter = borders[min(inner, key=lambda index: abs(4 * borders[index] - end))]
        splits.append((0, quarter, half, most, end))
    ranges = [(0, units), *itertools.chain(*(itertools.pairwise(split) for split in splits if _is_cut(split)))]
    return tuple(
        Lane(id=LaneId(index), units=tuple(range(first, last)))
        for index, (first, last) in enumerate(dict.fromkeys(ranges))
    )


def _is_cut(split: Sequence[int]) -> bool:
    """Return whether every lane of a split has units: atoms may be too large for it."""
    return all(first < last for first, last in itertools.pairwise(split))


def lanes_for_two(lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
    """Return lane 0 and the lanes of splits in two: a plan of two branches is found sooner among few lanes."""
    narrow = {frozenset(lane.units) for lane in lanes[1:]}
    everything = frozenset[int]().union(*narrow)
    return tuple(
        lane for lane in lanes if lane is lanes[0] or not lane.units or everything.difference(lane.units) in narrow
    )


def with_network(lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
    """Return a catalogue with one more lane, which has no units: segments that only wait for other ranks run there."""
    return (*lanes, Lane(id=LaneId(len(lanes)), units=()))


def atom_borders(atoms: Iterable[int]) -> list[int]:
    """Return the first unit of every atom, and the unit after the last atom, given the sizes of the atoms."""
    return [0, *itertools.accumulate(atoms)]
