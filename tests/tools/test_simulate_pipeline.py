"""`apollo pipeline simulate` on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Apollo

VISION = {
    **{"name": "vision", "replicas": [[0], [1], [2], [3]]},
    **{"forward_ns": [[40_000_000]], "backward_ns": [[80_000_000]]},
}
CASE: dict[str, Any] = {
    "num_ranks": 4,
    "num_microbatches": 8,
    "times": {"forward_ns": [80_000_000] * 4, "backward_ns": [160_000_000] * 4},
    "encoders": [VISION],
}


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A file that describes a pipeline of four ranks."""
    path = tmp_path / "four.json"
    path.write_text(json.dumps(CASE))
    return path


def test_a_file_is_simulated_and_drawn(case: Path, tmp_path: Path, apollo: Apollo) -> None:
    """Steps as a table; the page and the trace where they are asked for; facts as JSON, to the nanosecond."""
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    ran = apollo("pipeline", "simulate", case, "--html", page, "--trace", trace)
    assert ran.code == 0 and "four: 1f1b, 4 ranks, 4 stages, 8 micro-batches" in ran.out
    rows = {line.split("  ")[0]: line.split() for line in ran.out.splitlines()}
    assert rows["without encoders"][2:4] == ["2.64", "s"]
    assert rows["fine"][1:5] == ["2.76", "s", "+120.00", "ms"]
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]
    ran = apollo("pipeline", "simulate", case, "--json")
    facts = json.loads(ran.out)
    assert ran.code == 0
    assert [facts[name]["step_ns"] for name in ("without encoders", "fine")] == [2_640_000_000, 2_760_000_000]
    assert set(facts["fine"]["replica_of"][0]) == {0, 1, 2, 3} and len(facts["fine"]["replica_of"][0]) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 3}, "times.forward_ns has 4 durations, but there are 3 stages"),
        (
            {"times": {**CASE["times"], "forward_ns": [1, 1, -1, 1]}},
            "expected one of at least 0 per stage, got (1, 1, -1",
        ),
        ({"stages_per_rank": 2}, "1f1b has one stage per rank, got 2; use 'interleaved 1f1b'"),
        ({"schedule": "2f2b"}, "schedule is '2f2b'; expected one of"),
        ({"colour": 1}, "unknown fields ['colour']"),
        ({"encoders": [{**VISION, "replicas": [[0, 1]]}]}, "encoder vision has 1 stages"),
        ({"encoders": [{**VISION, "replicas": [[-1]]}]}, "replica on device -1"),
    ],
)
def test_what_is_no_pipeline_is_one_line(case: Path, change: dict[str, Any], message: str, apollo: Apollo) -> None:
    """With the field, and what to do."""
    case.write_text(json.dumps({**CASE, **change}))
    ran = apollo("pipeline", "simulate", case)
    assert ran.code == 1 and message in ran.err


def test_a_limit_that_forbids_coarse_filling_is_said_and_so_is_a_missing_file(case: Path, apollo: Apollo) -> None:
    """Fine filling meets the limit; the line about the file has its name."""
    case.write_text(json.dumps({**CASE, "encoders": [{**VISION, "max_live": 1}]}))
    ran = apollo("pipeline", "simulate", case)
    assert ran.code == 0 and "coarse: not possible" in ran.out
    case.unlink()
    ran = apollo("pipeline", "simulate", case)
    (line,) = ran.err.splitlines()
    assert ran.code == 2 and case.name in line
