"""What is shipped besides the code."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib import resources
from pathlib import Path

import pytest

import apollo_compile

ROOT = Path(__file__).parents[1]


def test_type_checkers_of_users_see_the_types_of_the_package(tmp_path: Path) -> None:
    """It has the marker of PEP 561, without which every name of it is unknown to them, and the marker is shipped."""
    assert resources.files(apollo_compile).joinpath("py.typed").is_file()
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert "apollo_compile/py.typed" in names
