"""The demo trains a CLIP, and shows its report and its speed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from benchmarks.demo import main

VARIANTS = ["eager", "inductor", "apollo-serial", "apollo"]


@pytest.fixture
def _as_in_a_process() -> Iterator[None]:
    """Dynamo knows of no other shapes; later tests do not see its log."""
    torch._dynamo.reset()
    logger = logging.getLogger("apollo_compile")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.soak
@pytest.mark.usefixtures("_as_in_a_process")
def test_the_demo_trains_reports_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 says that the loss fell and that gradients of the variants are eager's."""
    arguments = ["--size", "tiny", "--steps", "3", "--rounds", "1", "--warm-cache"]
    code = main([*arguments, "--variants", ",".join(VARIANTS)])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    _, training, report, _, gradients, times, steps = printed.split("=== ")
    assert "step   3/3" in training
    assert "vision_model.encoder.layers.1" in report and "text_model.encoder.layers.1" in report
    assert all(f"\n{variant} " in text for variant in VARIANTS for text in (gradients, times))
    assert all(f"\n{variant} " in steps for variant in ("eager", "apollo", "apollo-step"))
