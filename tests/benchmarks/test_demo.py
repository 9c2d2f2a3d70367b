"""The demo trains a CLIP, and shows its report and its speed."""

from __future__ import annotations

import logging

import pytest
import torch

from benchmarks.demo import main

VARIANTS = ["eager", "inductor", "apollo-serial", "apollo"]


@pytest.mark.soak
def test_the_demo_trains_and_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 says that the loss fell and that gradients of the variants are eager's."""
    logger = logging.getLogger("apollo_compile")
    monkeypatch.setattr(logger, "level", logger.level)  # the demo sets it, and later tests do not see its log
    torch._dynamo.reset()
    arguments = ["--size", "tiny", "--steps", "3", "--rounds", "1", "--warm-cache"]
    code = main([*arguments, "--variants", ",".join(VARIANTS)])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    _, training, report, _, gradients, times, steps = printed.split("=== ")
    assert "step   3/3" in training
    assert "vision_model.encoder.layers.1" in report and "text_model.encoder.layers.1" in report
    assert all(f"\n{variant} " in text for variant in VARIANTS for text in (gradients, times))
    assert all(f"\n{variant} " in steps for variant in ("eager", "apollo", "apollo-step"))
