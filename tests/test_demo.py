"""The demo trains a CLIP, and shows what became of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from apollo_compile.bench import VARIANTS, Measurement, Task, measure
from benchmarks import demo


@pytest.fixture
def _log_level() -> Iterator[None]:
    """The demo shows what the package logs; later tests are not to."""
    logger = logging.getLogger("apollo_compile")
    level = logger.level
    yield
    logger.setLevel(level)


def _only_two(task: Task, **options: Any) -> Measurement:
    return measure(task, [variant for variant in VARIANTS if variant.name in ("eager", "apollo")], **options)


@pytest.mark.slow
@pytest.mark.usefixtures("_log_level")
@pytest.mark.parametrize("variants", ["two", pytest.param("all", marks=pytest.mark.soak)])
def test_the_demo_trains_reports_and_compares(
    variants: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 says that the loss fell and that gradients of all variants are eager's."""
    if variants == "two":  # the others take most of the time
        monkeypatch.setattr(demo, "measure", _only_two)
    code = demo.main(["--size", "tiny", "--steps", "3", "--rounds", "1", "--warm-cache"])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    _, training, report, _, gradients, times = printed.split("=== ")
    assert "step   3/3" in training
    assert "vision_model.encoder.layers.1" in report and "text_model.encoder.layers.1" in report
    for variant in ("eager", "apollo") if variants == "two" else ("eager", "inductor", "apollo-serial", "apollo"):
        assert f"\n{variant} " in gradients and f"\n{variant} " in times
