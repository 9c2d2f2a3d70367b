"""What is shipped besides the code: the marker, facts about the package, wheels, documented and typed names."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from email.message import Message
from email.parser import Parser
from importlib import resources
from importlib.util import find_spec
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


def test_the_package_says_whose_it_is_under_which_licence_and_for_what(tmp_path: Path) -> None:
    """Which an index shows, and installers read; the version is that of the code."""
    run_backend("prepare_metadata_for_build_wheel", tmp_path)
    facts: Message = Parser().parsestr(next(tmp_path.glob("*.dist-info/METADATA")).read_text())
    assert facts["Version"] == apollo_compile.__version__
    assert (facts["License-Expression"], facts["License-File"]) == ("MIT", "LICENSE")
    addresses = dict(each.split(", ") for each in facts.get_all("Project-URL") or ())
    assert set(addresses) == {"Repository", "Documentation", "Issues", "Changelog"}
    assert all(each.startswith(addresses["Repository"]) for each in addresses.values())
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {facts['Version']}\n" in citation and f"repository-code: {addresses['Repository']}\n" in citation
    assert facts["Author"] in (ROOT / "LICENSE").read_text()
    pythons = [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)]
    assert {*pythons, "Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(facts.get_all("Classifier") or ())


def test_the_extra_of_examples_has_what_they_import() -> None:
    """And what the Trainer needs beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"torch", "apollo_compile", *project["optional-dependencies"]["examples"]}
    for path in (ROOT / "examples").glob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
        others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
        own = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"examples"}
        assert others - own <= there, path.name


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
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


TRAIN = """
import copy, logging, shutil, torch
import apollo_compile
assert shutil.which("c++") is None and shutil.which("g++") is None
class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2))
    def forward(self, image, text):
        return self.image(image) @ self.text(text).T
torch.manual_seed(0)
model, inputs = Towers(), (torch.randn(8, 64), torch.randn(8, 64))
losses = []
for run in (copy.deepcopy(model), torch.compile(model, backend="apollo")):
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(run(*inputs), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
assert abs(losses[0] - losses[1]) < 1e-5, losses
print(apollo_compile.report(model))
"""


@pytest.mark.soak
def test_a_wheel_installs_imports_and_trains_without_a_compiler(tmp_path: Path) -> None:
    """The wheel that `make wheel` made for this Python, in an environment of its own that finds torch in this one."""
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    wheels = list((ROOT / "dist").glob(f"*-{apollo_compile.__version__}-{tag}-manylinux*_{platform.machine()}.whl"))
    if not wheels:
        pytest.skip("there is no wheel: `make wheel` makes it")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    path = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels], env=path, check=True)
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site / "torch.pth").write_text(str(Path(torch.origin).parents[1]))  # comes behind its own, which has the wheel
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "PYTHONPATH")}
    done = {
        name: subprocess.run(
            [python, "-c", code], cwd=tmp_path, env={**inherited, **path}, capture_output=True, text=True, check=False
        )
        for name, code in (
            ("train", TRAIN),
            ("doctor", "from apollo_compile.tools.cli import main; main(['doctor'])"),
            ("where", "import apollo_compile._native as native; print(native.__file__)"),
        )
    }
    assert shutil.which("c++", path=path["PATH"]) is None
    assert done["train"].returncode == 0, done["train"].stderr
    assert done["train"].stderr.count("graphs run operator by operator") == 1
    assert "install g++ and Python's headers" in done["doctor"].stdout
    assert str(site) in done["where"].stdout, done["where"].stderr
