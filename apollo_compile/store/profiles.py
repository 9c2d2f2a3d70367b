"""Files of device profiles: packaged files, files that a user names, and files in the cache.

    load_profile(path), save_profile(...)       a file that a user names; `load_profile` also takes a packaged name
    default_profile(units)                      the packaged profile of CPUs
    cached_profile_path(...)                    the cached profile of this machine
    inspect_profile(path, fingerprint)          the profile in a file, if it is of the machine with this fingerprint

A file has the fingerprint of the machine that its profile was measured on. A damaged or stale file is not used; a stale
calibrated profile stays on disk, since it took minutes to make.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from apollo_compile.errors import ConfigError
from apollo_compile.store.files import FileFormat, FileState, Found
from apollo_compile.target.fingerprint import Fingerprint, describe_changes
from apollo_compile.target.profile import DeviceProfile, limit_units


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    fingerprint: Fingerprint | None
    profile: DeviceProfile
    method: int = 1
    """Number of the way in which profiles are measured; earlier files have none."""


_FORMAT = FileFormat(kind="profile", number=5, content=_Content, max_bytes=4 * 2**20)
"""File format of profiles; a measured profile takes about 20 kB."""

_METHOD = 2
"""1: BLAS computed every matmul. 2: the library that a body would use."""

_OTHER_WAY = "another version of apollo measured it, and did not time the libraries that bodies use for matmuls"


def packaged_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    files = (file.name for file in resources.files("apollo_compile.device").joinpath("profiles").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


@functools.cache
def packaged_profile(name: str) -> DeviceProfile:
    """Return one of the profiles that come with the package."""
    text = resources.files("apollo_compile.device").joinpath("profiles", f"{name}.json").read_text(encoding="utf-8")
    return _FORMAT.parse(text).profile


def default_profile(units: int) -> DeviceProfile:
    """Return the packaged profile of CPUs for `units` units, which does not depend on the machine."""
    return limit_units(packaged_profile("cpu"), units)


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile from a file, or the packaged profile of that name if there is no such file.

    Raises:
        ConfigError: the file cannot be read or is not a profile.
    """
    try:
        return _FORMAT.read(path).profile
    except FileNotFoundError as error:
        if str(path) in packaged_profiles():
            return packaged_profile(str(path))
        raise _unreadable(path, error) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read device profile {path}: {error}; expected a file that 'apollo calibrate' wrote, or one of "
        f"{', '.join(packaged_profiles())}"
    )


def save_profile(profile: DeviceProfile, path: Path, *, fingerprint: Fingerprint | None = None) -> None:
    """Write a profile to a file atomically. Raises `OSError` if that fails."""
    _FORMAT.write(path, _Content(fingerprint=fingerprint, profile=profile, method=_METHOD))


def format_profile(profile: DeviceProfile, *, fingerprint: Fingerprint | None = None) -> str:
    """Return the text of a profile's file."""
    return _FORMAT.format(_Content(fingerprint=fingerprint, profile=profile, method=_METHOD))


# ---------------------------------------------------------------------------------------------------------- cache


def cached_profile_path(cache_dir: Path, units: int) -> Path:
    """Return the file of the cached profile of this machine for `units` units."""
    return cache_dir / f"profile-{units}.json"


def inspect_profile(path: Path, fingerprint: Fingerprint) -> Found[DeviceProfile]:
    """Return the profile in a file if it was measured on the machine with this fingerprint.

    A profile of another machine or version of torch, or measured in another way, is stale; one that was scaled by a
    quick measurement counts as missing then, since it may be replaced.
    """
    found = _FORMAT.inspect(path)
    if found.content is None:
        return Found(state=found.state, detail=found.detail)
    profile, before = found.content.profile, found.content.fingerprint
    is_same_way = found.content.method == _METHOD
    if before == fingerprint and profile.units == fingerprint.units and is_same_way:
        return Found(state=FileState.CURRENT, content=profile)
    state = FileState.MISSING if profile.source == "scaled" else FileState.STALE
    changes = describe_changes(before, fingerprint) or ("other units" if is_same_way else _OTHER_WAY)
    return Found(state=state, detail=changes)
