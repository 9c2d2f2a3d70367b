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


def test_jobs_without_commands_have_no_scripts(trace: Path, apollo: Apollo) -> None:
    """Nothing is written."""
    ran = apollo("cluster", "plan", "trace.csv", *ON_CLUSTER, "--slurm", "scripts")
    assert ran.code == 1 and "has no command" in ran.err and not (trace / "scripts").exists()


@pytest.mark.usefixtures("trace")
def test_an_unknown_policy_is_an_error(apollo: Apollo) -> None:
    """In a line."""
    ran = apollo("cluster", "simulate", "trace.csv", *ON_CLUSTER, "--policy", "fair")
    assert ran == (1, "", "apollo cluster: unknown policy 'fair'; known: fcfs, gavel, apollo\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--jobs", "0"], "a number of at least 1, got '0'"), (["--load", "nan"], "a number above 0, got 'nan'")],
)
def test_numbers_that_make_no_trace_are_refused(apollo: Apollo, option: list[str], message: str) -> None:
    """By the parser of the arguments."""
    ran = apollo("cluster", "generate", "t.csv", *ON_CLUSTER, *option)
    assert ran.code == 2 and f"expected {message}" in ran.err
