"""The checks of models and steps that decide about a GPU, run on its stand-in: is their own code right?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_compile.device.gpu.run.execute import CudaExecutable
from benchmarks import gpu_step_checks, gpu_training_checks
from tests.device.gpu.fake_gpu import FakeGpu, open_stand_in
from tests.session.test_captured import BusyGpu
from tests.session.trained import interpret_plainly

DEVICE: Any = SimpleNamespace(device=torch.device("cpu"))
"""All that these checks ask of a GPU themselves."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let the checks compile for the stand-in, where bodies take no time to compile; they share nothing yet."""
    for checks, name in ((gpu_training_checks, "FORMULA_OPTIONS"), (gpu_step_checks, "DEFAULT_OPTIONS")):
        monkeypatch.setattr(checks, name, {**getattr(checks, name), "runtime.bodies": "eager"})
    own = {"runtime.bodies": "eager", "partition.granularity": "module"}
    monkeypatch.setattr(gpu_step_checks, "STEP_OPTIONS", {**gpu_step_checks.STEP_OPTIONS, **own})
    monkeypatch.setattr(gpu_training_checks, "_shared", [])
    return open_stand_in(monkeypatch, BusyGpu())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[CudaExecutable]:
    """Return what the checks poison: replays of the stand-in do that by themselves."""
    found: list[CudaExecutable] = []
    monkeypatch.setattr(gpu_training_checks, "_poison", found.append)
    return found


@pytest.fixture
def with_state(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays know of the state of optimizers, and let torch.compile interpret."""
    interpret_plainly(monkeypatch)
    compile_step = gpu_step_checks.compile_step

    def compile_for_stand_in(model: Any, loss_fn: Any, optimizer: torch.optim.Optimizer, **others: Any) -> Any:
        gpu.hidden = lambda: [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        return compile_step(model, loss_fn, optimizer, **others)

    monkeypatch.setattr(gpu_step_checks, "compile_step", compile_for_stand_in)


def assert_met(check: Callable[..., Any], gpu: FakeGpu, **arguments: Any) -> str:
    """Run a check, which has to be met without a race; return its text."""
    outcome = check(DEVICE, **arguments)
    assert outcome.is_met, outcome.text
    assert not gpu.races
    return str(outcome.text)


@pytest.mark.soak
@pytest.mark.parametrize(
    "check",
    [
        gpu_training_checks.training_is_as_in_eager,
        gpu_training_checks.loops_are_as_in_eager,
        gpu_training_checks.masks_are_those_of_inductor,
        gpu_training_checks.backwards_have_the_masks_of_their_forwards,
        gpu_training_checks.masks_are_right_under_replay,
    ],
)
def test_a_check_passes(gpu: FakeGpu, check: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training of four encoders, loops that keep, add up, hold or drop, dropout from one seed, slopes of the loss."""
    if check is gpu_training_checks.masks_are_those_of_inductor:  # eager draws other masks
        compiled = {**gpu_training_checks.FORMULA_OPTIONS, "runtime.bodies": "python"}
        monkeypatch.setattr(gpu_training_checks, "FORMULA_OPTIONS", compiled)
    assert_met(check, gpu)


@pytest.mark.soak
def test_masks_that_do_not_follow_the_seed_are_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since nobody sets it."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    outcome = gpu_training_checks.masks_are_right_under_replay(DEVICE)
    assert not outcome.is_met and "reseeded: False; as launched: False" in outcome.text


def test_replays_do_not_race_and_a_wrong_number_is_found(
    gpu: FakeGpu, poisoned: list[CudaExecutable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trunk behind two encoders, poisoned before every step, forward and backward; then one forward is off."""
    assert_met(gpu_training_checks.replays_do_not_race, gpu, count=6)
    assert len(poisoned) == 2 * 6
    run = CudaExecutable.run

    def spoil(executable: CudaExecutable, inputs: list[torch.Tensor]) -> Sequence[Any]:
        outputs = run(executable, inputs)
        return [output * 1.5 for output in outputs] if len(poisoned) == 2 * 10 else outputs

    monkeypatch.setattr(CudaExecutable, "run", spoil)
    assert not gpu_training_checks.replays_do_not_race(DEVICE, count=6).is_met


@pytest.mark.soak
@pytest.mark.usefixtures("with_state")
def test_steps_are_those_of_the_loop(gpu: FakeGpu) -> None:
    """AdamW, and SGD with micro-batches and clipping."""
    assert_met(gpu_step_checks.steps_are_those_of_the_loop, gpu)


@pytest.mark.soak
@pytest.mark.usefixtures("with_state")
def test_a_loop_with_other_numbers_is_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are larger by a hundredth."""
    loop_step = gpu_step_checks._loop_step
    monkeypatch.setattr(gpu_step_checks, "_loop_step", lambda *arguments: 1.01 * loop_step(*arguments))
    assert not gpu_step_checks.steps_are_those_of_the_loop(DEVICE).is_met


@pytest.mark.usefixtures("with_state")
def test_sizes_and_numbers_may_change(gpu: FakeGpu) -> None:
    """Losses are eager's, and what no CUDA graph can hold is torch.compile's."""
    assert "its sizes change" in assert_met(gpu_step_checks.sizes_and_numbers_may_change, gpu)
