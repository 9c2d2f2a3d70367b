"""`apollo cluster`, from a trace to a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apollo_compile.cluster.files import read_plan
from apollo_compile.tools.cli import main
from apollo_compile.tools.cluster import format_s

CLUSTER = """
[[node]]
kind = "fast"
count = 2
devices = 4

[[node]]
kind = "slow"
count = 2
devices = 4
"""

PLAN = ["cluster", "plan", "trace.csv", "--cluster", "cluster.toml"]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a cluster and twenty jobs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    assert main(["cluster", "generate", "trace.csv", "--cluster", "cluster.toml", "--jobs", "20", "--load", "2"]) == 0
    assert capsys.readouterr().out.startswith("trace.csv: 20 jobs, the last of which arrives after")
    return tmp_path


def test_a_simulation_is_a_row_per_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says that it is one; JSON has the same numbers."""
    command = ["cluster", "simulate", "trace.csv", "--cluster", "cluster.toml", "--policy", "fcfs,apollo"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "20 jobs, simulated by the steps that their gangs take; nothing was run" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["fcfs", "apollo"]
    assert main([*command, "--json"]) == 0
    fcfs, apollo = json.loads(capsys.readouterr().out)
    assert apollo["mean_completion_s"] < fcfs["mean_completion_s"]
    assert format_s(apollo["mean_completion_s"]) in text


def test_a_plan_is_shown_and_saved(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as JSON for a run."""
    assert main([*PLAN, "--objective", "makespan", "--save", "plan.json"]) == 0
    text = capsys.readouterr().out
    plan = read_plan(trace / "plan.json")
    assert text.startswith(f"makespan {format_s(plan.makespan_s)}, at most ")
    assert len(plan.placements) == 20 == len(text.splitlines()) - 4


def test_jobs_without_commands_have_no_scripts(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written."""
    assert main([*PLAN, "--slurm", "scripts"]) == 1
    assert "has no command" in capsys.readouterr().err and not (trace / "scripts").exists()


def test_an_unknown_policy_is_an_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a line."""
    assert main(["cluster", "simulate", "trace.csv", "--cluster", "cluster.toml", "--policy", "fair"]) == 1
    assert capsys.readouterr().err == "apollo cluster: unknown policy 'fair'; known: fcfs, gavel, apollo\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--jobs", "0"], "a number of at least 1, got '0'"), (["--load", "nan"], "a number above 0, got 'nan'")],
)
def test_numbers_that_make_no_trace_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    """By the parser of the arguments."""
    with pytest.raises(SystemExit):
        main(["cluster", "generate", "t.csv", "--cluster", "cluster.toml", *option])
    assert f"expected {message}" in capsys.readouterr().err
