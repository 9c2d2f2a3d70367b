"""In a dry run, whatever is missing is a complaint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu_suite import dry
from benchmarks.gpu_suite.checks import CheckResult
from benchmarks.gpu_suite.race import Result
from benchmarks.gpu_suite.stages import Report, StageRecord
from benchmarks.gpu_suite.targets import Target

TITLE = "clip_b32, batch 32, bf16"

FINE = Result(
    name="apollo",
    first_step_s=1.0,
    warm_up={"steps": 8},
    losses=[1.0],
    memory={"peak_bytes": 2, "warm_bytes": 1},
    launch={"host_ns": 1, "device_ns": None},
    decided={"ran": []},
    loops_ns=[1],
    steps_ns=[[1]],
)


def report_of(result: Result) -> Report:
    """Return the report of a dry run that went through, with one variant."""
    return Report(
        is_dry=True,
        stages=[
            StageRecord(name="device", state="done"),
            StageRecord(name=dry.FAILING, state="failed", note="on purpose"),
        ],
        checks=[CheckResult(name="T0 driver", state="skipped", text="needs a GPU")],
        workloads={TITLE: {"apollo": result}},
        ledger={"apollo": {"segments": []}},
        targets=[Target(name="controls", wanted=">= 0.98x", found="1.00x", state="dry run")],
    )


def complaints(report: Report) -> list[str]:
    """Return the complaints where everything is wanted."""
    return dry.complaints_about(report, variants={TITLE: ["apollo"]}, ledger=["apollo"], has_targets=True)


def test_a_dry_run_that_went_through_is_well() -> None:
    """Checks that need a GPU are none of it."""
    assert complaints(report_of(FINE)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"losses": [], "note": "died"}, f"{TITLE}: apollo has no losses: died"),
        ({"loops_ns": [], "steps_ns": []}, f"{TITLE}: apollo has no loops_ns, steps_ns"),
        ({"memory": {"peak_bytes": 2, "warm_bytes": 0}}, f"{TITLE}: apollo has no warm_bytes of memory"),
    ],
)
def test_every_variant_has_every_figure(change: dict[str, object], text: str) -> None:
    """Else there is a complaint that names it, and says why."""
    assert complaints(report_of(replace(FINE, **change))) == [text]


def test_everything_else_is_there_too() -> None:
    """Stages, checks, variants, the ledger, and a figure for each target."""
    report = report_of(FINE)
    report.stages[0] = StageRecord(name="device", state="late", note="ended 9 s after its time")
    report.stages[1] = StageRecord(name=dry.FAILING, state="done")
    report.checks = [CheckResult(name="doctor", state="skipped", text="no time left")]
    report.workloads, report.ledger = {}, {}
    report.targets = [Target(name="controls", wanted=">= 0.98x", found="", state="dry run")]
    found = complaints(report)
    assert found[:3] == [
        "stage device was late: ended 9 s after its time",
        f"stage {dry.FAILING} was done",
        "check doctor: no time left",
    ]
    assert found[3].startswith(f"{TITLE}: apollo has no first_step_s, warm_up, losses")
    assert found[4:] == ["the ledger has no apollo", "there is no figure for the target: controls"]
