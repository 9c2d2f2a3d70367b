"""The lane catalogue: the few lanes that a program on a device may use.

    lane_catalogue(units, atom, num_atoms) -> lanes

Lane 0 has every unit. Then come the lanes of the splits: two halves, and three quarters beside one quarter. Lanes of
different splits overlap; a plan orders the segments on them, so they never run at the same time. A short catalogue
costs little: plans from 3 to 14 lanes differ by a few percent, and every lane is a thread that somebody has to keep.

A GPU gives its units out in atoms of several, and seldom as many atoms as its units would fill: an H200 with 132 SMs
may have 15 of 8. Then the splits are those of its atoms, unit `u` belongs to atom `u // atom`, and units that are in no
atom are lane 0's alone.
"""

from __future__ import annotations

from apollo_compile.ir import Lane, LaneId


def lane_catalogue(units: int, atom: int = 1, num_atoms: int | None = None) -> tuple[Lane, ...]:
    """Return the lanes of a device with `units` units, given out by `atom`; no two have the same units.

    `num_atoms` is None where there are as many as fit.
    """
    if units < 1 or atom < 1:
        raise ValueError(f"a device needs at least 1 unit, got {units} in atoms of {atom}; check the device profile")
    ranges, atoms = [(0, units)], units // atom if num_atoms is None else num_atoms
    if not 0 <= atoms * atom <= units:
        raise ValueError(f"{atoms} atoms of {atom} units are more than the {units} of the device; check its profile")
    if atoms >= 2:
        ranges += _split(atoms, -(-atoms // 2), atom)
    if atoms >= 4:
        ranges += _split(atoms, round(atoms * 3 / 4), atom)
    return tuple(
        Lane(id=LaneId(index), units=tuple(range(first, last)))
        for index, (first, last) in enumerate(dict.fromkeys(ranges))
    )


def _split(atoms: int, border: int, atom: int) -> list[tuple[int, int]]:
    return [(0, border * atom), (border * atom, atoms * atom)]
