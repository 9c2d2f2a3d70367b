"""The recipes of docs/stacks.md have eager's losses; those whose framework is not installed are skipped."""

from __future__ import annotations

import ast
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from apollo_compile.session import registry
from apollo_compile.session.step.returned import find_loss
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import compile_step
from apollo_compile.torch_bridge.trees import map_tensors
from tests.end_to_end.test_docs import ROOT, blocks_of
from tests.end_to_end.test_examples import use_bodies
from tests.end_to_end.twins import run_loop

RECIPES = {block.title: block.code for block in blocks_of(ROOT / "docs" / "stacks.md") if block.title}

NEEDED_BY = {
    "accelerate": ("accelerate", "trainer", "trainer_step"),  # which the Trainer needs beside transformers
    "diffusers": ("dit", "unet"),
    "lerobot": ("lerobot_act", "lerobot_diffusion"),
    "open_clip": ("open_clip",),
    "peft": ("peft",),
    "pytorch_lightning": ("lightning", "lightning_step"),
    "sentence_transformers": ("sentences",),
    "stable_baselines3": ("sac", "sac_step"),
    "timm": ("timm",),
    "torch": ("loop", "resume"),
    "torchrl": ("dreamer", "torchrl_sac"),
}
NEEDS = {recipe: package for package, recipes in NEEDED_BY.items() for recipe in recipes}
"""The package that a recipe needs."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, and no warnings: those are the frameworks' own."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield tmp_path


def run(name: str, compiling: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Return the variables of a recipe, run in a folder of its own with `compiling` as the arguments of compile."""
    torch._dynamo.reset()
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = RECIPES[name]
    assert code.count('backend="apollo"') + code.count("apollo_compile.compile_step(") == 1
    module = ModuleType(f"recipe_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks for the module of what it inlines
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    code = code.replace("apollo_compile.compile_step(", "make_step(")
    options = compiling.partition("options=")[2]
    is_eager = compiling == 'backend="eager"'
    vars(module)["made_steps"] = made = []

    def make_step(*arguments: Any, **settings: Any) -> Any:
        chosen = {"options": ast.literal_eval(options)} if options else {}
        made.append((InEager if is_eager else partial(compile_step, **chosen))(*arguments, **settings))
        return made[-1]

    vars(module)["make_step"] = make_step
    exec(compile(code.replace('backend="apollo"', compiling), f"{name}.py", "exec"), vars(module))
    return vars(module)


@dataclass
class InEager:
    """The loop that a step of `compile_step` stands for."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None = None
    microbatches: int = 1
    clip_grad_norm: float = math.inf
    outputs: Any = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take a step."""
        parts = split_evenly(batch, self.microbatches)
        total = run_loop(self.model, self.loss_of, parts, self.optimizer, self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return total

    def loss_of(self, model: torch.nn.Module, part: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, and keep what else there is."""
        returned = self.loss_fn(model, part)
        self.outputs = map_tensors(torch.Tensor.detach, returned)
        return find_loss(returned)


def test_every_recipe_is_tested() -> None:
    """And every row of the table has one, or a page of its own."""
    assert RECIPES.keys() == NEEDS.keys()
    rows = [line for line in (ROOT / "docs" / "stacks.md").read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == 12


@pytest.mark.slow
@pytest.mark.parametrize("bodies", ["eager", pytest.param("native", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_losses_of_eager(
    name: str, bodies: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seed and eager's random numbers; some model was compiled for it."""
    pytest.importorskip(NEEDS[name])
    expected = run(name, 'backend="eager"', folder / "eager", monkeypatch)["losses"]
    compiling = f'backend="apollo", options={{"runtime.bodies": "{bodies}", "inductor": {{"fallback_random": True}}}}'
    known = {id(model) for model in registry.compiled_models()}
    own = run(name, compiling, folder / "apollo", monkeypatch)
    assert any(id(model) not in known for model in registry.compiled_models())
    assert own["losses"] == pytest.approx(expected, rel=1e-2 if name == "loop" else 1e-4)  # the loop uses bfloat16
    assert len(expected) > 1 and all(map(math.isfinite, expected))
    assert expected.count(0.0) < len(expected) / 2  # SAC's temperature has none in its first step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dreamer", "lerobot_act", "lerobot_diffusion", "sac_step", "torchrl_sac"])
def test_steps_of_policies_and_learners_are_programs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the forward of the package, and one graph for all steps; they have the losses of eager."""
    pytest.importorskip(NEEDS[name])
    expected = run(name, 'backend="eager"', folder / "eager", monkeypatch)["losses"]
    chosen = {"runtime.bodies": "eager", "plan.autotune": False, "plan.replan": False, "plan.min_gain": 0.0}
    own = run(name, f'backend="apollo", options={chosen}', folder / "apollo", monkeypatch)
    assert own["losses"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert [step.verdicts for step in own["made_steps"]] == [["plan"]] * len(own["made_steps"])


@pytest.mark.slow
def test_the_trainer_compiles_by_the_name_of_the_backend_once_it_is_registered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before; verdict, metrics and page come once, at the end: here nothing is decided before."""
    use_bodies("eager", monkeypatch)
    utils = pytest.importorskip("accelerate.utils")
    integration = pytest.importorskip("apollo_compile.integrations.transformers")
    monkeypatch.setattr(utils.DynamoBackend, "_missing_", utils.DynamoBackend._missing_)
    with pytest.raises(ValueError, match="APOLLO"):
        utils.TorchDynamoPlugin(backend="apollo")
    for _ in range(2):
        integration.register()
    assert utils.TorchDynamoPlugin(backend="apollo").to_kwargs()["backend"] == "apollo"
    with pytest.raises(ValueError, match="APOLO"):
        utils.TorchDynamoPlugin(backend="apolo")
    code = RECIPES["trainer"].replace('model.compile(backend="apollo")\n', "")
    code = code.replace('    output_dir="out",', '    output_dir="out", torch_compile_backend="apollo",')
    monkeypatch.setitem(RECIPES, "trainer", code)
    told: list[str] = []
    monkeypatch.setattr(integration._logger, "warning", told.append)
    known = {id(model) for model in registry.compiled_models()}
    found = run("trainer", 'backend="apollo"', folder / "trainer", monkeypatch)
    assert any(id(model) not in known for model in registry.compiled_models())
    assert len(told) == 1 and "measuring, about" in told[0]
    (row,) = [row for row in found["trainer"].state.log_history if "apollo/settled" in row]
    assert row["step"] == 4
    assert row["apollo/graphs_on_lanes"] + row["apollo/graphs_in_turn"] + row["apollo/fallbacks"] > 0
    assert "<html" in (folder / "trainer" / "out" / "apollo.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "steps"), [("measuring", [4]), ("settled: plan on 2 lanes", [2])])
def test_lightning_logs_the_verdict_once_and_saves_the_page(
    verdict: str, steps: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is reached, else at the end; the metrics go to every logger."""
    lightning = pytest.importorskip("pytorch_lightning")
    integration = pytest.importorskip("apollo_compile.integrations.lightning")
    told: list[str] = []
    monkeypatch.setattr(integration, "rank_zero_info", told.append)
    monkeypatch.setattr(integration, "status", lambda model: verdict)

    class Logger(lightning.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.rows.append((step, metrics))

    code = RECIPES["lightning"].replace("logger=False", "logger=LOGGER, log_every_n_steps=2")
    code = code.replace("import torch\n", "import torch\nfrom tests.end_to_end.test_stacks import LOGGER\n", 1)
    monkeypatch.setitem(RECIPES, "lightning", code)
    monkeypatch.setattr(sys.modules[__name__], "LOGGER", Logger(), raising=False)
    run("lightning", 'backend="apollo", options={"runtime.bodies": "eager"}', folder / "lightning", monkeypatch)
    own = [(step, metrics) for step, metrics in Logger.rows if "apollo/settled" in metrics]
    assert [step for step, _ in own] == steps and told == [verdict]
    assert json.dumps(own)
    assert list(folder.rglob("apollo.html"))
