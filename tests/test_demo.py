"""The demo trains a CLIP, and shows what became of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from benchmarks.demo import main


@pytest.fixture
def _log_level() -> Iterator[None]:
    """The demo shows what the package logs; later tests are not to."""
    logger = logging.getLogger("apollo_compile")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.usefixtures("_log_level")
def test_the_demo_trains_reports_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 says that the loss fell and that gradients of all variants are eager's."""
    code = main(["--size", "tiny", "--steps", "3", "--rounds", "1", "--warm-cache"])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    _, training, report, _, gradients, times = printed.split("=== ")
    assert "step   3/3" in training
    assert "vision_model.encoder.layers.1" in report and "text_model.encoder.layers.1" in report
    for variant in ("eager", "inductor", "apollo-serial", "apollo"):
        assert f"\n{variant} " in gradients and f"\n{variant} " in times
