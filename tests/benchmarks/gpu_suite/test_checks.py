"""Checks are asked of a process, whatever becomes of one of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.errors import ApolloError
from benchmarks.gpu_suite import checks
from benchmarks.gpu_suite.checks import LEAST_CHECK_S, Checks
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
    assert [(check.name, check.state) for check in report.checks] == [
        ("one", "ok"),
        ("two", "ok"),
        ("dies", "failed"),
        ("raises", "failed"),
        ("three", "ok"),
        ("hangs", "failed"),
        ("late", "skipped"),
    ]
    found = {check.name: check for check in report.checks}
    assert found["one"].numbers["pid"] == found["two"].numbers["pid"] == report.facts["pid"]
    assert found["three"].numbers["pid"] != report.facts["pid"]
    assert "exit code 9" in found["dies"].text and "did not answer" in found["hangs"].text


class Clocked:
    """A clock, and a process whose checks take 20 seconds by it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def ask(self, request: tuple[Any, ...], limit_s: float, *, start_limit_s: float) -> Any:
        """Take 20 seconds, or as long as it may."""
        self.now += min(20.0, limit_s)
        if limit_s < 20:
            raise ApolloError("did not answer")
        return {"name": request[1], "state": "ok", "text": ""}

    def stop(self) -> None:
        """Do nothing."""


def test_checks_are_made_in_order_as_long_as_they_are_wanted_and_have_time() -> None:
    """One that would have little waits until there is more; one that does not end is not made again."""
    clock, report = Clocked(), Report(is_dry=False)
    asked = Checks(clock, clock, {"quick": ["a"], "long": ["b", "c", "d", "e", "f"]})
    asked.run(("long",), report, 1100.0, is_wanted=lambda: clock.now < 1030)
    assert clock.now == 1040 and [check.name for check in report.checks] == ["b", "c"]
    asked.run(("quick", "long"), report, 1060 + LEAST_CHECK_S - 1)
    assert clock.now == 1060 and [check.name for check in report.checks] == ["b", "c", "a"]
    asked.run(("quick", "long"), report, 1080 + LEAST_CHECK_S + 1)
    assert [(check.name, check.state) for check in report.checks[3:]] == [("d", "ok"), ("e", "skipped")]
    assert report.checks[-1].text == "no time left: it did not end"
    asked.skip_rest(report)
    assert [(check.name, check.state) for check in report.checks[5:]] == [("f", "skipped")]
