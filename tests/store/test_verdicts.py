"""What runs Dynamo graphs on a GPU is kept as it was; what cannot be read is measured again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.store.verdicts import Choice, Verdicts

VERDICT = Verdict(
    winner="one CUDA graph",
    selection=(Variant.INDUCTOR,),
    standings=(
        Standing(name="one CUDA graph", step_ns=9.0, ratio=1.0, num_rounds=5),
        Standing(name=Variant.COMPILED, step_ns=10.0, ratio=1.1, num_rounds=5),
    ),
    num_steps=120,
)


@pytest.mark.parametrize("choice", [Choice(verdict=VERDICT, reason="one chain"), Choice(verdict=None, reason="no")])
def test_a_choice_is_recalled_as_it_was(tmp_path: Path, choice: Choice) -> None:
    """By its key alone."""
    Verdicts(tmp_path / "new").keep("a", choice)
    assert Verdicts(tmp_path / "new").recall("a") == choice
    assert Verdicts(tmp_path / "new").recall("b") is None


def test_what_is_damaged_or_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process goes on, and compares."""
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        assert Verdicts(tmp_path).recall("a") is None
        Verdicts(tmp_path / "file").keep("a", Choice(verdict=VERDICT))
    first, second = caplog.messages
    assert first.startswith("the variants of a graph are compared again: ")
    assert second.startswith("the selected variant of a graph is not kept: ")
