"""The checks of whole models that decide about a GPU, run on its stand-in: is their own code right?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from apollo_compile import backend
from apollo_compile.session import registry
from apollo_compile.session.model import CompiledModel
from benchmarks import gpu_training_checks as checks
from tests.device.gpu.test_training import Compiler

DEVICE = SimpleNamespace(device=torch.device("cpu"))
"""All that these checks ask of a GPU themselves."""


class StandIn:
    """Takes the place of the backend, and of the list of what it compiled."""

    def __init__(self) -> None:
        self.compilers: list[Compiler] = []
        self.poisoned: list[Any] = []
        self.options: dict[str, Any] = {"runtime.bodies": "eager"}
        self.spoil: Callable[[Sequence[Any]], Sequence[Any]] = lambda outputs: outputs

    def compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any]
    ) -> Callable[..., Any]:
        """Compile with lanes of the stand-in."""
        self.compilers.append(Compiler(**{**options, **self.options}))
        run = self.compilers[-1](graph_module, example_inputs)
        return lambda *arguments: self.spoil(run(*arguments))

    def models(self) -> list[CompiledModel]:
        return [model for compiler in self.compilers for model in compiler.models]

    def num_races(self) -> int:
        """Count uses of memory that another lane may read still."""
        return sum(len(compiler.gpu.races) for compiler in self.compilers)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let the checks compile for the stand-in, whose replays poison what they write by themselves."""
    made = StandIn()
    monkeypatch.setattr(backend, "apollo", made.compile)
    monkeypatch.setattr(registry, "compiled_models", made.models)
    monkeypatch.setattr(checks, "_poison", made.poisoned.append)
    monkeypatch.setattr(checks, "_shared", [])
    return made


@pytest.mark.soak
@pytest.mark.parametrize(
    ("check", "options"),
    [
        (checks.training_is_as_in_eager, {"runtime.bodies": "eager"}),
        (checks.loops_are_as_in_eager, {"runtime.bodies": "eager"}),
        (checks.masks_are_those_of_inductor, {"runtime.bodies": "python"}),  # since eager draws other masks
    ],
)
def test_a_check_passes(stand_in: StandIn, check: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """Training of four encoders, loops that keep, add up, hold or drop, and dropout from one seed."""
    stand_in.options = options
    outcome = check(DEVICE)
    assert outcome.is_met, outcome.text
    assert not stand_in.num_races()


@pytest.mark.soak
def test_checks_of_dropout_share_a_model(stand_in: StandIn) -> None:
    """Gradients are slopes of the loss, and masks follow the seed; another model is another one's."""
    for check in (checks.backwards_have_the_masks_of_their_forwards, checks.masks_are_right_under_replay):
        outcome = check(DEVICE)
        assert outcome.is_met, outcome.text
    assert len(stand_in.compilers) == 1 and not stand_in.num_races()
    run, inputs = checks._fresh(DEVICE, "clip_b32", dropout=checks.DROPOUT)
    with torch.no_grad():
        run(inputs)
    assert len(stand_in.compilers) == 2
    assert checks._compiled(DEVICE, "clip_b32", dropout=checks.DROPOUT)[0] is not run


@pytest.mark.soak
def test_masks_that_do_not_follow_the_seed_are_found(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since nobody sets it."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    outcome = checks.masks_are_right_under_replay(DEVICE)
    assert not outcome.is_met and "reseeded: False; as launched: False" in outcome.text


def test_replays_do_not_race(stand_in: StandIn) -> None:
    """A trunk behind two encoders, poisoned before every step, forward and backward."""
    outcome = checks.replays_do_not_race(DEVICE, count=6)
    assert outcome.is_met, outcome.text
    assert len(stand_in.poisoned) == 2 * 6 and not stand_in.num_races()


def test_a_wrong_number_is_found(stand_in: StandIn) -> None:
    """One loss of many is off."""
    calls: list[None] = []

    def spoil(outputs: Sequence[Any]) -> Sequence[Any]:
        calls.append(None)
        return [output * 1.5 for output in outputs] if len(calls) == 9 else outputs

    stand_in.spoil = spoil
    outcome = checks.replays_do_not_race(DEVICE, count=6)
    assert not outcome.is_met, outcome.text
