"""`apollo cluster`, from a trace to a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apollo_compile.cluster.files import read_plan
from apollo_compile.tools.cluster import format_s
from tests.tools.conftest import Apollo

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

ON_CLUSTER = ("--cluster", "cluster.toml")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apollo: Apollo) -> Path:
    """A folder with a cluster and twenty jobs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    ran = apollo("cluster", "generate", "trace.csv", *ON_CLUSTER, "--jobs", 20, "--load", 2)
    assert ran.code == 0 and ran.out.startswith("trace.csv: 20 jobs, the last of which arrives after")
    return tmp_path


def test_a_simulation_is_a_row_per_policy(trace: Path, apollo: Apollo) -> None:
    """And says that it is one; JSON has the same numbers."""
    command = ("cluster", "simulate", "trace.csv", *ON_CLUSTER, "--policy", "fcfs,apollo")
    text, as_json = apollo(*command), apollo(*command, "--json")
    assert text.code == as_json.code == 0
    assert "20 jobs, simulated by the steps that their gangs take; nothing was run" in text.out
    assert [line.split()[0] for line in text.out.splitlines()[-2:]] == ["fcfs", "apollo"]
    fcfs, ours = json.loads(as_json.out)
    assert ours["mean_completion_s"] < fcfs["mean_completion_s"]
    assert format_s(ours["mean_completion_s"]) in text.out


def test_a_plan_is_shown_and_saved(trace: Path, apollo: Apollo) -> None:
    """As a table and as JSON for a run."""
    ran = apollo("cluster", "plan", "trace.csv", *ON_CLUSTER, "--objective", "makespan", "--save", "plan.json")
    plan = read_plan(trace / "plan.json")
    assert ran.code == 0 and ran.out.startswith(f"makespan {format_s(plan.makespan_s)}, at most ")
    assert len(plan.placements) == 20 == len(ran.out.splitlines()) - 4


@pytest.mark.parametrize(
    ("command", "option", "code", "message"),
    [
        ("plan", ("--slurm", "scripts"), 1, " has no command"),
        ("simulate", ("--policy", "fair"), 1, "unknown policy 'fair'; known: fcfs, gavel, apollo\n"),
        ("generate", ("--jobs", "0"), 2, "expected a number of at least 1, got '0'"),
        ("generate", ("--load", "nan"), 2, "expected a number above 0, got 'nan'"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(
    command: str, option: tuple[str, str], code: int, message: str, trace: Path, apollo: Apollo
) -> None:
    """Scripts of jobs without commands, policies that nobody knows, numbers that make no trace."""
    before = set(trace.iterdir())
    ran = apollo("cluster", command, "trace.csv", *ON_CLUSTER, *option)
    assert (ran.code, ran.out) == (code, "") and message in ran.err
    assert code == 2 or ran.err.startswith("apollo cluster: ")
    assert set(trace.iterdir()) == before
