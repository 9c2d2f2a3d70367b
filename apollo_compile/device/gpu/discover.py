"""Find the profile of a GPU: measured if 'apollo calibrate --gpu' did, else what an H200's data sheet says.

discover_gpu_profile(fingerprint, cache_dir=...) -> DeviceProfile
gpu_fingerprint(name, cuda=..., units=...) -> Fingerprint
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from apollo_compile.device.fingerprint import Fingerprint, installed_torch
from apollo_compile.device.profile import DeviceProfile
from apollo_compile.store.profiles import ProfileState, cached_gpu_profile_path, find_profile, packaged_profile

_logger = logging.getLogger(__name__)

DRIVER_RELEASE = Path("/sys/module/nvidia/version")
"""File with the release of NVIDIA's driver on Linux."""


def discover_gpu_profile(
    fingerprint: Fingerprint, *, cache_dir: Path | None = None, level: int = logging.WARNING
) -> DeviceProfile:
    """Return the profile of the GPU with this fingerprint; the data-sheet profile of an H200 if it was not measured.

    Arguments:
        fingerprint: of the GPU, its driver and torch.
        cache_dir: where measured profiles are.
        level: of the line that says that it was not measured.
    """
    path = None if cache_dir is None else cached_gpu_profile_path(cache_dir, fingerprint)
    found = None if path is None else find_profile(path, fingerprint)
    if found is not None and found.profile is not None:
        return found.profile
    substitute = packaged_profile("h200")
    if found is None or found.state is ProfileState.MISSING:  # else there was a warning about the file
        _tell_of_substitute(fingerprint.device, substitute.name, level)
    return substitute


@functools.cache
def _tell_of_substitute(device: str, name: str, level: int) -> None:
    """Say once per GPU that plans use the profile of another one."""
    if not f"{name} ".startswith(f"{device} "):
        message = "%s was not measured: plans count on an %s; 'apollo calibrate --gpu' measures it"
        _logger.log(level, message, device, name)


def gpu_fingerprint(name: str, *, cuda: int, units: int, release_file: Path = DRIVER_RELEASE) -> Fingerprint:
    """Return the fingerprint of measurements on a GPU.

    Arguments:
        name: name of the GPU.
        cuda: CUDA version of the driver, as 13000; many driver releases have the same.
        units: number of its SMs.
        release_file: file with the release of the driver; without it, only the CUDA version is used.
    """
    try:
        driver = f"{release_file.read_text(encoding='utf-8').strip()} (CUDA {cuda})"
    except OSError:
        driver = f"CUDA {cuda}"
    return Fingerprint(device=name, driver=driver, torch=installed_torch(), cores=units, units=units)
