"""Fingerprint of a GPU: its name, driver and SMs, and torch.

gpu_fingerprint(name, cuda=..., units=...) -> Fingerprint
"""

from __future__ import annotations

from pathlib import Path

from apollo_compile.target.fingerprint import Fingerprint, installed_torch

DRIVER_RELEASE = Path("/sys/module/nvidia/version")
"""File with the release of NVIDIA's driver on Linux."""


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
