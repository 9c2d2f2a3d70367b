"""Facts needed to reproduce a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from apollo_compile.device.cpu.machine import cpu_model


def machine_facts() -> dict[str, Any]:
    """Return versions, commit, CPU and number of cores."""
    import torch

    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": _commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
