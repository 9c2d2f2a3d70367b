"""Name, features and fingerprint of this machine's CPU. Nothing here imports torch.

machine_fingerprint(units)  the fingerprint of measurements on this machine
cpu_model()                 the name of the CPU
cpu_description()           model, vendor, and the features by which libraries choose kernels
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from apollo_compile.target.fingerprint import Fingerprint, installed_torch

CPU_FACTS = Path("/proc/cpuinfo")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "sve2", "i8mm", "bf16", "sme")
"""Flags of an x86 or ARM CPU by which GEMM libraries choose kernels."""


def machine_fingerprint(units: int) -> Fingerprint:
    """Return the fingerprint of measurements on this machine."""
    cores = os.cpu_count() or 1
    return Fingerprint(device=cpu_model(), driver=None, torch=installed_torch(), cores=cores, units=units)


def cpu_model(file: Path = CPU_FACTS) -> str:
    """Return the name of the CPU, or of its architecture if the system does not report a name."""
    facts = _cpu_facts(file)
    if "CPU part" in facts:  # ARM CPUs have numbers instead of names
        return f"{platform.machine()} {facts.get('CPU implementer')}/{facts['CPU part']}"
    return facts.get("model name") or platform.processor() or platform.machine()


def cpu_description(file: Path = CPU_FACTS) -> str:
    """Return model, vendor and `CPU_FEATURES` of the CPU, on which step times depend."""
    facts = _cpu_facts(file)
    flags = (facts.get("flags") or facts.get("Features", "")).split()
    details = [facts.get("vendor_id", ""), *(feature for feature in CPU_FEATURES if feature in flags)]
    return f"{cpu_model(file)} ({', '.join(filter(None, details))})" if any(details) else cpu_model(file)


def _cpu_facts(file: Path) -> Mapping[str, str]:
    """Return the fields of the first CPU in `file`, by name; empty if it cannot be read."""
    try:
        first, _, _ = file.read_text().partition("\n\n")
    except OSError:
        return {}
    facts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in facts}
