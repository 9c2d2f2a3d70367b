"""The programs in examples/ have eager's losses, and run as programs; the notebook runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apollo_compile.config import Config, load_config
from apollo_compile.session import backend, registry
from apollo_compile.session.step import step

FOLDER = Path(__file__).parents[2] / "examples"
BODIES = ["eager", pytest.param("native", marks=pytest.mark.soak)]
PLANS = {"deploy", "simulate_deployment"}
"""Programs that compile nothing; `tests/distributed/test_deploy.py` runs them."""
PROGRAMS = sorted({path.stem for path in FOLDER.glob("*.py")} - PLANS)


@pytest.fixture
def train_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[float]]]:
    """A function that trains as a program does, with a tiny model, in a folder and a process group of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))  # as for a script: one of them imports another
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    known = set(sys.modules)

    def train(program: str, backend: str, steps: int) -> list[float]:
        torch._dynamo.reset()
        spec = importlib.util.spec_from_file_location(program, FOLDER / f"{program}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[program] = module
        spec.loader.exec_module(module)
        losses: list[float] = module.train(backend, steps=steps, width=32, layers=1)
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the frameworks' own
        yield train
    dist.destroy_process_group()
    for name in set(sys.modules) - known:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def use_bodies(bodies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs and steps run with these bodies unless their options say otherwise."""

    def load(options: Mapping[str, Any] | None = None) -> Config:
        return load_config({"runtime.bodies": bodies, **(options or {})})

    for module in (backend, step):
        monkeypatch.setattr(module, "load_config", load)


@pytest.mark.slow
@pytest.mark.parametrize("bodies", BODIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_losses_of_eager(
    program: str, bodies: str, train_in: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over so many steps that a whole step has been linked; something was compiled."""
    if program in ("clip", "trainer"):
        pytest.importorskip("transformers")
    if program == "trainer":
        pytest.importorskip("accelerate")
    use_bodies(bodies, monkeypatch)
    steps = 40 if program == "whole_step" else 4
    expected = train_in(program, "eager", steps)
    known = {id(model) for model in registry.compiled_models()}
    assert train_in(program, "apollo", steps) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == steps
    assert any(id(model) not in known for model in registry.compiled_models())


def test_the_page_of_examples_names_all_of_them() -> None:
    """And no other."""
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted([*PROGRAMS, *PLANS])
    assert len(PROGRAMS) == 5


@pytest.mark.soak
@pytest.mark.parametrize("bodies", ["eager", "native"])
def test_the_notebook_runs(
    bodies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells are plain Python; what a cell ends with can be shown, and it ends with a step that has a state."""
    monkeypatch.chdir(tmp_path)
    use_bodies(bodies, monkeypatch)
    cells = json.loads((FOLDER / "first_report.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for number, source in enumerate("".join(each["source"]) for each in cells if each["cell_type"] == "code"):
        *statements, last = ast.parse(source).body
        exec(compile(ast.Module(statements, []), f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), f"cell {number}", "exec"), names)
    planned, trained, metrics = (each for each in shown if each is not None)
    assert all("&lt;svg" in each._repr_html_() for each in (planned, trained))  # in a frame of its own
    assert metrics["apollo/predicted_gain"] >= 1
    assert re.search(r"loss \d\.\d+; (measuring|settled|falls back)", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    """As its page says, and says in what state it is in the end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if program == "ddp" else []
    command = [sys.executable, *launcher, str(FOLDER / f"{program}.py")]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "GLOO_SOCKET_IFNAME": "lo"}
    captured = {"capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **captured)
    assert done.returncode == 0, done.stderr
    state = r"step 50: loss \d\.\d+; (measuring|settled|falls back)"
    assert re.search("trainer/apollo.html" if program == "trainer" else state, done.stdout)
