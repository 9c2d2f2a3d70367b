"""Checks are asked of a process, whatever becomes of one of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu_suite import checks
from benchmarks.gpu_suite.checks import Checks
from benchmarks.gpu_suite.device import DeviceProcess, look_at_device
from benchmarks.gpu_suite.stages import Report
from tests.benchmarks.gpu_suite import steppers


def test_checks_go_on_after_one_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or hangs in it, or may have ruined the device; others share a process."""
    report = Report(is_dry=False)
    names = {"first": ["one", "two", "dies", "raises", "three"], "second": ["hangs"], "third": ["late"]}
    with DeviceProcess("cpu", tmp_path, f"{steppers.__name__}:Looker") as process:
        look_at_device(process, time.monotonic, report, time.monotonic() + 60)
        asked = Checks(process, time.monotonic, names)
        asked.run(("first",), report, time.monotonic() + 600)
        monkeypatch.setattr(checks, "CHECK_LIMIT_S", 2.0)
        asked.run(("first", "second"), report, time.monotonic() + 600)
    asked.run(("third",), report, time.monotonic() - 1)
    asked.skip_rest(report)
    asked.skip_rest(report)
    assert report.facts["gpu"] == "Fake GPU" and report.facts["copy_bytes_per_s"] == 1e12
    assert [check.name for check in report.checks] == [*names["first"], "hangs", "late"]
    states = ["ok", "ok", "failed", "failed", "ok", "failed", "skipped"]
    assert [check.state for check in report.checks] == states
    found = {check.name: check for check in report.checks}
    assert found["one"].numbers["pid"] == found["two"].numbers["pid"] == report.facts["pid"]
    assert found["three"].numbers["pid"] != report.facts["pid"]
    assert "exit code 9" in found["dies"].text and "did not answer" in found["hangs"].text
