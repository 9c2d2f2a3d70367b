"""The lane catalogue: the few lanes that a program on a device may use.

    lane_catalogue(units) -> lanes

Lane 0 has every unit. Then come the lanes of the splits: two halves, and three quarters beside one quarter. Lanes of
different splits overlap; a plan orders the segments on them, so they never run at the same time. A short catalogue
costs little: plans from 3 to 14 lanes differ by a few percent, and every lane is a thread that somebody has to keep.
"""

from __future__ import annotations

from apollo_compile.ir import Lane, LaneId


def lane_catalogue(units: int) -> tuple[Lane, ...]:
    """Return the lanes of a device with `units` units; no two have the same units."""
    if units < 1:
        raise ValueError(f"a device needs at least 1 unit, got {units}; check the device profile")
    ranges = [(0, units)]
    if units >= 2:
        ranges += _split(units, -(-units // 2))
    if units >= 4:
        ranges += _split(units, round(units * 3 / 4))
    return tuple(
        Lane(id=LaneId(index), units=tuple(range(first, last)))
        for index, (first, last) in enumerate(dict.fromkeys(ranges))
    )


def _split(units: int, border: int) -> list[tuple[int, int]]:
    return [(0, border), (border, units)]
