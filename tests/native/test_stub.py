"""The stub of the extension."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from apollo_compile import _native


def test_the_stub_is_the_one_of_the_built_module(tmp_path: Path) -> None:
    """`make stub` writes it; a change of the bindings changes it too."""
    pytest.importorskip("nanobind")
    made = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", _native.__name__, "-o", str(made)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=900)
    stub = Path(__file__).parents[2] / "apollo_compile" / "_native.pyi"
    assert made.read_text() == stub.read_text()
