from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from apollo_compile.ir import Lane
from apollo_compile.target.lanes import atom_borders, lane_catalogue, lanes_for_two

H200 = (*[8] * 14, 20)
"""Its atoms."""


def tilings(lanes: Sequence[Lane], num_lanes: int) -> list[tuple[Lane, ...]]:
    """Return all sets of so many narrow lanes that have every unit of an atom once, by trying all."""
    everything = sorted({unit for lane in lanes[1:] for unit in lane.units})
    return [
        chosen
        for chosen in itertools.combinations(lanes[1:], num_lanes)
        if sorted(unit for lane in chosen for unit in lane.units) == everything
    ]


@pytest.mark.parametrize(
    ("units", "atoms", "sizes"),
    [
        (1, None, [1]),
        (2, None, [2, 1, 1]),
        (3, None, [3, 2, 1, 1, 1]),
        (4, None, [4, 2, 2, 3, 1, 1, 2, 1, 1]),
        (16, None, [16, 8, 8, 12, 4, 5, 6, 5, 4, 4, 4]),
        (132, None, [132, 66, 66, 99, 33, 44, 44, 44, 33, 33, 33]),
        (132, H200, [132, 64, 68, 96, 36, 48, 40, 44, 32, 32, 32]),
        (132, H200[:-1], [132, 56, 56, 80, 32, 40, 32, 40, 24, 32, 24]),
        (12, (1, 1, 1, 9), [12, 3, 9]),
        (20, (8, 12), [20, 8, 12]),
        (7, (7,), [7]),
        (7, (), [7]),
    ],
)
def test_the_catalogue_has_all_units_then_halves_quarters_and_thirds(
    units: int, atoms: Sequence[int] | None, sizes: list[int]
) -> None:
    """Three quarters beside one; the three other quarters come last. Atoms that are too large make fewer splits."""
    assert [len(lane.units) for lane in lane_catalogue(units, atoms)] == sizes


@pytest.mark.parametrize("seed", range(40))
def test_every_lane_is_part_of_a_split(seed: int) -> None:
    """Lanes are few, no two alike, and end between atoms; equal atoms allow splits in two, three and four."""
    rng = random.Random(seed)
    is_equal, num_atoms = rng.random() < 0.5, rng.randrange(1, 40)
    atoms = num_atoms * [rng.randrange(1, 9)] if is_equal else [rng.randrange(1, 9) for _ in range(num_atoms)]
    lanes = lane_catalogue(sum(atoms) + rng.choice((0, 3)), atoms)
    assert len(lanes) <= 11 and len({lane.units for lane in lanes}) == len(lanes)
    borders = set(atom_borders(atoms))
    for lane in lanes[1:]:
        assert {lane.units[0], lane.units[-1] + 1} <= borders
        assert lane.units == tuple(range(lane.units[0], lane.units[-1] + 1))
    found = {count: tilings(lanes, count) for count in (2, 3, 4)}
    assert {lane for split in itertools.chain(*found.values()) for lane in split} == set(lanes[1:])
    if is_equal:
        assert [count for count, split in found.items() if split] == [
            count for count in (2, 3, 4) if count <= num_atoms
        ]


@pytest.mark.parametrize("atoms", [(1, 1), (1,) * 4, (1,) * 16, H200])
def test_two_branches_need_the_splits_in_two_only(atoms: tuple[int, ...]) -> None:
    """Halves, and three quarters beside a quarter: the lanes of a pair that has all units."""
    lanes = lane_catalogue(sum(atoms), atoms)
    pairs = {lane for pair in tilings(lanes, 2) for lane in pair}
    assert set(lanes_for_two(lanes)) == {lanes[0], *pairs}
    assert len(pairs) == (4 if len(atoms) > 2 else 2)


@pytest.mark.parametrize(
    ("units", "atoms", "message"),
    [
        (0, None, "check the device profile"),
        (20, [8, 8, 8], r"a device of 20 units cannot have atoms of \[8, 8, 8\] units"),
    ],
)
def test_a_device_that_cannot_be_is_refused(units: int, atoms: Sequence[int] | None, message: str) -> None:
    """Without units, or with more atoms than fit: a profile that was written by hand."""
    with pytest.raises(ValueError, match=message):
        lane_catalogue(units, atoms)
