"""`apollo pipeline simulate` on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.tools.cli import main

CASE: dict[str, Any] = {
    "num_ranks": 4,
    "num_microbatches": 8,
    "times": {"forward_ns": [80_000_000] * 4, "backward_ns": [160_000_000] * 4},
    "encoders": [
        {
            "name": "vision",
            "forward_ns": [[40_000_000]],
            "backward_ns": [[80_000_000]],
            "replicas": [[0], [1], [2], [3]],
        }
    ],
}


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A file that describes a pipeline of four ranks."""
    path = tmp_path / "four.json"
    path.write_text(json.dumps(CASE))
    return path


def test_a_file_is_simulated_and_drawn(case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps as a table; the page and the trace where they are asked for."""
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["pipeline", "simulate", str(case), "--html", str(page), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "four: 1f1b, 4 ranks, 4 stages, 8 micro-batches" in printed
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    assert rows["without encoders"][2:4] == ["2.64", "s"]
    assert rows["fine"][1:5] == ["2.76", "s", "+120.00", "ms"]
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_facts_are_json(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the nanosecond."""
    assert main(["pipeline", "simulate", str(case), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["without encoders"]["step_ns"] == 2_640_000_000
    assert facts["fine"]["step_ns"] == 2_760_000_000
    assert set(facts["fine"]["replica_of"][0]) == {0, 1, 2, 3} and len(facts["fine"]["replica_of"][0]) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 3}, "times.forward_ns has 4 durations, but there are 3 stages"),
        ({"stages_per_rank": 2}, "1f1b has one stage per rank, got 2; use 'interleaved 1f1b'"),
        ({"schedule": "2f2b"}, "schedule is '2f2b'; expected one of"),
        ({"colour": 1}, "unknown fields ['colour']"),
        ({"encoders": [{**CASE["encoders"][0], "replicas": [[0, 1]]}]}, "encoder vision has 1 stages"),
        ({"encoders": [{**CASE["encoders"][0], "replicas": [[-1]]}]}, "replica on device -1"),
    ],
)
def test_what_is_no_pipeline_is_one_line(
    case: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the field, and what to do."""
    case.write_text(json.dumps({**CASE, **change}))
    assert main(["pipeline", "simulate", str(case)]) == 1
    assert message in capsys.readouterr().err


def test_a_limit_that_forbids_coarse_filling_is_said(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fine filling meets it."""
    case.write_text(json.dumps({**CASE, "encoders": [{**CASE["encoders"][0], "max_live": 1}]}))
    assert main(["pipeline", "simulate", str(case)]) == 0
    assert "coarse: not possible" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name."""
    assert main(["pipeline", "simulate", str(tmp_path / "none.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.json" in line
