"""Fingerprint of the machine that a measurement was taken on.

    Fingerprint                     device, driver, torch, cores and units
    describe_changes(before, now)   differences between two, as text
    installed_torch()               the version of torch, without importing it

`device/cpu/machine.py` makes the fingerprint of this machine, and `device/gpu/fingerprint.py` that of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Properties of device and software that a measurement depends on."""

    device: str
    driver: str | None
    """None if the device needs no driver."""
    torch: str
    cores: int
    units: int


def describe_changes(before: Fingerprint | None, now: Fingerprint) -> str:
    """Return how `now` differs from the fingerprint of an earlier measurement, as text; "" if it does not."""
    if before is None:
        return "it does not say where it was measured"
    pairs = ((field.name, getattr(before, field.name), getattr(now, field.name)) for field in fields(Fingerprint))
    return ", ".join(f"{name} {old!r} is now {new!r}" for name, old, new in pairs if old != new)


def installed_torch() -> str:
    """Return torch's version, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:  # torch is imported from a source tree
        return "unknown"
