"""The benchmark of first steps: who takes turns with whom, and what the table says of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_step

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
"""Where compiled code is, and the compiler's precompiled headers."""


def test_backends_take_turns_and_the_table_has_medians(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cold process of each first, with folders of its own, then warm ones in the same folders."""
    calls: list[tuple[str, str, Path]] = []
    seconds = {"inductor": iter([40.0, 2.0, 9.0, 4.0]), "apollo": iter([60.0, 1.0, 3.0, 2.0])}

    def run(name: str, size: str, backend: str, folder: Path, *, settle: bool) -> dict[str, float]:
        assert settle == (len(calls) < 2), "cold processes alone see the comparison to its end"
        calls.append((name, backend, folder))
        return {"first_step_s": next(seconds[backend]), "later_s": 7.0, "peak_bytes": 2**20 * len(calls)}

    monkeypatch.setattr(first_step, "_in_a_process", run)
    file = tmp_path / "out.json"
    assert first_step.main(["--workloads", "clip", "--warm", "3", "--json", str(file)]) == 0
    order = [backend for _, backend, _ in calls]
    assert order == ["apollo", "inductor", "inductor", "apollo"] * 2
    assert len({folder for _, backend, folder in calls if backend == "apollo"}) == 1
    assert {name for name, _, _ in calls} == {"clip"}
    table = first_step.format_rows(json.loads(file.read_text())["workloads"])
    (row,) = [line for line in table.splitlines() if line.startswith("clip ")]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells[:8] == ["clip", "40.0 s", "60.0 s", "7.0 s", "1.50x", "4.0 s", "2.0 s", "0.50x"]
    assert row in capsys.readouterr().out


@pytest.mark.soak
def test_a_process_tells_its_first_step_and_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, but with what other tests compiled."""
    run = subprocess.run

    def run_warm(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        empty = {env.pop(variable) for variable in CACHES}
        assert empty == {str(tmp_path / "inductor"), str(tmp_path / "tmp")}
        return run(command, env={**env, **{name: os.environ[name] for name in CACHES if name in os.environ}}, **options)

    monkeypatch.setattr(first_step.subprocess, "run", run_warm)
    monkeypatch.setenv("APOLLO_PROFILE", "no such profile")  # settings of the caller are not the process's
    got = first_step._in_a_process("two_tower", "tiny", "apollo", tmp_path, settle=False)
    assert got["first_step_s"] > 0 == got["later_s"]
    assert got["peak_bytes"] > 100 * 2**20
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_at_least_one_warm_process(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no median of none."""
    with pytest.raises(SystemExit):
        first_step.main(["--warm", value])
    assert "at least 1" in capsys.readouterr().err
