"""How a CPU is called, by which measurements of different machines are told apart."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from apollo_compile.device.cpu.machine import cpu_description, cpu_model

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
flags\t\t: fpu avx2 avx512f

processor\t: 1
vendor_id\t: AuthenticAMD
"""

ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimddp sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40

processor\t: 1
"""


@pytest.mark.parametrize(
    ("told", "model", "features"),
    [
        (X86, "AMD EPYC", "AuthenticAMD, avx2, avx512f"),
        (ARM, f"{platform.machine()} 0x41/0xd40", "sve, bf16"),
        (ARM.replace("0xd40", "0xd0c"), f"{platform.machine()} 0x41/0xd0c", "sve, bf16"),
    ],
)
def test_a_cpu_is_told_by_model_and_features(told: str, model: str, features: str, tmp_path: Path) -> None:
    """Of x86 by name and vendor, of ARM, which has no names, by the numbers of the maker and of the part."""
    path = tmp_path / "cpuinfo"
    path.write_text(told)
    assert (cpu_model(path), cpu_description(path)) == (model, f"{model} ({features})")


def test_a_system_that_does_not_tell_has_a_model_all_the_same(tmp_path: Path) -> None:
    """At least that of the architecture."""
    described = cpu_description(tmp_path / "missing")
    assert described == cpu_model(tmp_path / "missing") and described
