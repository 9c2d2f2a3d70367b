"""Conversions and text forms of times and sizes; no other file has any."""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def format_ns(duration_ns: float) -> str:
    """Return a duration with a readable unit: `950 ns`, `12.3 us`, `4.56 ms`, `7.89 s`."""
    size = abs(duration_ns)
    if size < NS_PER_US:
        return f"{duration_ns:.0f} ns"
    if size < NS_PER_MS:
        return f"{duration_ns / NS_PER_US:.1f} us"
    if size < NS_PER_S:
        return f"{duration_ns / NS_PER_MS:.2f} ms"
    return f"{duration_ns / NS_PER_S:.2f} s"


def format_roughly(duration_ns: float) -> str:
    """Return an estimated duration without decimals: `1 s`, `95 s`, `3 min`."""
    seconds = max(1, round(duration_ns / NS_PER_S))
    return f"{seconds} s" if seconds < 100 else f"{round(seconds / 60)} min"


def format_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit: `512 B`, `1.5 KiB`, `2.00 MiB`."""
    size = float(num_bytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 2)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def seconds_to_ns(seconds: float) -> int:
    """Return seconds as a whole number of nanoseconds."""
    return round(seconds * NS_PER_S)
