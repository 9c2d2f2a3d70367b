"""What the system says of this machine's CPU. Nothing here imports torch.

machine_fingerprint(units)  what a measurement on this machine depends on
cpu_model()                 the name of the CPU
cpu_description()           vendor, model, and the features that decide which kernels libraries have for it
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from apollo_compile.device.fingerprint import Fingerprint, installed_torch

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Flags of an x86 CPU that decide which kernels libraries of matrix products have for it."""


def machine_fingerprint(units: int) -> Fingerprint:
    """Return what a measurement on this machine depends on."""
    cores = os.cpu_count() or 1
    return Fingerprint(device=cpu_model(), driver=None, torch=installed_torch(), cores=cores, units=units)


def cpu_model() -> str:
    """Return the name of the CPU, as far as the system tells."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_description() -> str:
    """Return vendor and model of the CPU, and which of `CPU_FEATURES` it has: a step's time depends on all of them."""
    facts = _cpu_facts()
    flags = facts.get("flags", "").split()
    told = [facts.get("vendor_id", ""), *(feature for feature in CPU_FEATURES if feature in flags)]
    return f"{cpu_model()} ({', '.join(filter(None, told))})" if any(told) else cpu_model()


def _cpu_facts() -> Mapping[str, str]:
    """Return what Linux says of the first CPU, by the name of the fact."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    facts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in facts}
