"""What a measurement depends on besides what was measured.

    Fingerprint                 device, driver, torch, cores and units
    describe_changes(before, now)        what differs between two, in words
    installed_torch()           the version of torch, without importing it

`device/cpu/machine.py` makes the fingerprint of this machine, and `device/gpu/discover.py` that of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What a measurement depends on."""

    device: str
    driver: str | None
    """None where the device needs none."""
    torch: str
    cores: int
    units: int


def describe_changes(before: Fingerprint | None, now: Fingerprint) -> str:
    """Return in words how `now` differs from what something was measured on; "" where it does not."""
    if before is None:
        return "it does not say where it was measured"
    pairs = ((field.name, getattr(before, field.name), getattr(now, field.name)) for field in fields(Fingerprint))
    return ", ".join(f"{name} {old!r} is now {new!r}" for name, old, new in pairs if old != new)


def installed_torch() -> str:
    """Return torch's version, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:  # in a tree of its sources
        return "unknown"
