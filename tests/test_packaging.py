"""What is shipped besides the code: the marker, documented and typed names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import resources
from pathlib import Path

import pytest

import apollo_compile
from apollo_compile import errors

ROOT = Path(__file__).parents[1]


def run_backend(call: str, folder: Path) -> None:
    """Call a function of the build backend, in a process of its own, at the root of the checkout."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
    code = f"from scikit_build_core import build; build.{call}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_type_checkers_of_users_see_the_types_of_the_package(tmp_path: Path) -> None:
    """It has the marker of PEP 561, without which every name of it is unknown to them, and the marker is shipped."""
    assert resources.files(apollo_compile).joinpath("py.typed").is_file()
    run_backend("build_sdist", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert "apollo_compile/py.typed" in names


def test_every_public_name_is_in_the_reference_and_in_the_program_whose_types_are_checked() -> None:
    """`make check` gives the program to mypy, with the package; the reference has every error as well."""
    reference = re.findall(r"^::: apollo_compile\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(name for name in reference if "." not in name) == apollo_compile.__all__
    raised = [name.removeprefix("errors.") for name in reference if name.startswith("errors.")]
    assert sorted(raised) == sorted(name for name, value in vars(errors).items() if isinstance(value, type))
    program = (ROOT / "tests" / "public_names.py").read_text()
    assert sorted(set(re.findall(r"\bapollo_compile\.([a-zA-Z]\w*)(?<!errors)\b", program))) == apollo_compile.__all__
    settings = (ROOT / "pyproject.toml").read_text().split("[tool.mypy]\n")[1]
    assert settings.startswith("strict = true") and '"tests/public_names.py"' in settings.split("\n[")[0]


@pytest.mark.soak
def test_pyright_accepts_the_program_too(tmp_path: Path) -> None:
    """In its strict mode, in a folder of a user."""
    pytest.importorskip("pyright", reason="pyright is not installed")
    shutil.copy(ROOT / "tests" / "public_names.py", tmp_path)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
