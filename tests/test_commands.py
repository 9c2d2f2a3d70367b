"""Benchmarks that README and docs name run to their end, at their smallest size."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

COMMANDS = ("planner --only 'layered 10' --devices cpu16 --time-limits 0.1 --json {folder}/written",)
"""Arguments of `python -m benchmarks.`; tests/benchmarks/test_demo.py runs the demo."""

LONG = (
    "estimates --workloads chain --size tiny --json {folder}/written",
    "graphs --only vit_control --folder {folder}",
    "operators --only two_tower --json {folder}/written",
    "picture --size tiny --batch 4 --steps 3 --svg {folder}/written",
    "plan_error --workloads two_tower --size tiny --plans 3 --rounds 2 --json {folder}/written",
    "ranks --workloads two_tower --size tiny --microbatches 2 --rounds 2 --json {folder}/written",
    "run --workloads two_tower --size tiny --steps 3 --dtype float32,bfloat16 --warm-cache --json {folder}/written "
    "--variants eager,inductor-max-autotune,inductor-kept-memory,apollo",
    "steps --workloads chain --size tiny --microbatches 2 --steps 3 --warm-cache --json {folder}/written "
    "--variants eager,inductor,inductor-traced,inductor-traced-whole,apollo-step-program",
)
"""Those that take half a minute each, because they compile or calibrate: `make soak` runs them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, id=each.split()[0], marks=[pytest.mark.soak] if each in LONG else [])
        for each in COMMANDS + LONG
    ],
)
def test_a_command_writes_what_it_is_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported most of it."""
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # to be restored: `graphs` sets it
    module, *arguments = shlex.split(command.format(folder=tmp_path))
    assert not importlib.import_module(f"benchmarks.{module}").main(arguments), capsys.readouterr()
    written = [path for path in tmp_path.iterdir() if path.stat().st_size]
    assert written and set(written) == set(tmp_path.iterdir())
