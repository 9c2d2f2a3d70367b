"""The constants of a device fit each other, and fewer units are the same device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile.store.profiles import load_profile
from apollo_compile.target.profile import Rate, limit_units
from tests.profiles import CPU


def test_fewer_units_are_the_same_device() -> None:
    """Only the number that may be used changes."""
    assert limit_units(CPU, 2) == replace(CPU, name="test x2", units=2)


@pytest.mark.parametrize(("units", "atoms"), ((66, (*7 * (8,), 10)), (264, 33 * (8,)), (12, (12,)), (4, (4,))))
def test_other_numbers_of_units_come_in_atoms_of_the_same_size(units: int, atoms: tuple[int, ...]) -> None:
    """The last has what is left over."""
    limited = limit_units(replace(load_profile(Path("h200")), atoms=(*14 * (8,), 20)), units)
    assert (limited.units, limited.atoms) == (units, atoms)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"near_bytes_per_s": (Rate(size=1, per_s=(1.0, 2.0)),)}, "expected 4 positive rates"),
        ({"far_bytes_per_s": ()}, "ascending sizes"),
        ({"far_bytes_per_s": (Rate(size=2, per_s=(1.0,) * 4), Rate(size=1, per_s=(1.0,) * 4))}, "ascending sizes"),
        ({"far_bytes_per_s": (Rate(size=1, per_s=(1.0, 2.0, 3.0, 0.0)),)}, "positive rates"),
        ({"unit_counts": (2, 3, 4, 5)}, "unit counts from 1"),
        ({"units": 0}, "at least 1 unit"),
        ({"arithmetic": ()}, "rates of loops and of matrix products"),
        ({"tensor_ns": -1}, "no negative time"),
        ({"slowdown": ((1.0, 0.5), (1.0, 1.0))}, "at least 1"),
        *(({"atoms": atoms}, "expected atoms of 132 units together at most") for atoms in ((), (8, 0), (8,) * 17)),
    ],
)
def test_numbers_must_fit_each_other(changes: dict[str, object], says: str) -> None:
    """The message says what to do. Atoms may be fewer units together than the device has."""
    with pytest.raises(ValueError, match=f"{says}.*apollo calibrate"):
        replace(load_profile(Path("h200")) if "atoms" in changes else CPU, **changes)
