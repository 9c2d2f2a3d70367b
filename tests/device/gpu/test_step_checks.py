"""The checks of whole steps and of the default on a GPU, run on its stand-in: is their own code right?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_step_checks as checks
from tests.device.gpu import test_steps
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_checks import DEVICE

gpu = test_steps.gpu


@pytest.fixture
def check_steps(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the check compile for the stand-in, whose replays have to know of the optimizer's state."""
    compile_step = checks.compile_step

    def compile_for_stand_in(model: Any, loss_fn: Any, optimizer: torch.optim.Optimizer, **others: Any) -> Any:
        gpu.hidden = lambda: [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        return compile_step(model, loss_fn, optimizer, **others)

    monkeypatch.setattr(checks, "compile_step", compile_for_stand_in)
    plain = {"runtime.bodies": "eager", "partition.granularity": "module"}
    monkeypatch.setattr(checks, "STEP_OPTIONS", {**checks.STEP_OPTIONS, **plain})
    return checks.steps_are_those_of_the_loop


@pytest.mark.soak
def test_steps_are_those_of_the_loop(check_steps: Any) -> None:
    """AdamW, and SGD with micro-batches and clipping."""
    outcome = check_steps(DEVICE)
    assert outcome.is_met, outcome.text


@pytest.mark.soak
def test_a_loop_with_other_numbers_is_found(check_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are larger by a hundredth."""
    loop_step = checks._loop_step
    monkeypatch.setattr(checks, "_loop_step", lambda *arguments: 1.01 * loop_step(*arguments))
    assert not check_steps(DEVICE).is_met


def test_sizes_and_numbers_may_change(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are eager's, and what no CUDA graph can hold is torch.compile's."""
    monkeypatch.setattr(checks, "DEFAULT_OPTIONS", {**checks.DEFAULT_OPTIONS, "runtime.bodies": "eager"})
    outcome = checks.sizes_and_numbers_may_change(DEVICE)
    assert outcome.is_met and "its sizes change" in outcome.text, outcome.text
