"""Variants in processes of their own: what one does costs the others nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from apollo_compile.tools.bench.task import Task, Variant
from benchmarks.gpu_suite import device
from benchmarks.gpu_suite.device import DeviceProcess, look_at_device, run_checks
from benchmarks.gpu_suite.race import Result, race
from benchmarks.gpu_suite.stages import Report
from tests.benchmarks.gpu_suite import steppers

ROUNDS = 3


def variant(name: str) -> Variant:
    """Return a variant whose stepper has that name."""
    return Variant(name=name.lower(), backend="apollo", stepper=f"{steppers.__name__}:{name}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Let all of them take part."""
    names = ("Fine", "Dies", "Fails", "Breaks", "Hangs")
    return race(
        Task(builder=""),
        [variant(name) for name in names],
        tmp_path_factory.mktemp("race"),
        until=time.monotonic() + 300,
        clock=time.monotonic,
        start_limits_s={"hangs": 0.1},
        loop_steps=4,
        most_rounds=ROUNDS,
    )


def test_one_that_is_well_has_everything(results: dict[str, Result]) -> None:
    """Beside four that are not."""
    assert results["fine"] == Result(
        name="fine",
        first_step_s=1.5,
        warm_up={"steps": 8, "is_settled": True},
        losses=[1.0, 0.5],
        memory={"peak_bytes": 200, "warm_bytes": 100},
        launch={"host_ns": 10, "cpu_ns": 20, "device_ns": None},
        decided={"ran": ["fine"]},
        loops_ns=ROUNDS * [4 * steppers.NS],
        steps_ns=ROUNDS * [5 * [2 * steppers.NS]],
    )


def test_one_that_dies_keeps_what_it_gave(results: dict[str, Result]) -> None:
    """With how it ended, and the last line that it wrote."""
    found = results["dies"]
    assert found.memory and found.loops_ns == [4 * steppers.NS]
    assert "died at ('loop', 4), exit code 9" in found.note
    assert found.note.endswith("an illegal memory access was encountered")


def test_one_that_fails_takes_part_no_more(results: dict[str, Result]) -> None:
    """From where it failed on."""
    assert results["fails"].losses and not results["fails"].memory and not results["fails"].loops_ns
    assert results["fails"].note.endswith("RuntimeError: no allocator")
    assert results["breaks"].first_step_s is None and results["breaks"].note.endswith("CUDA out of memory")


def test_one_that_hangs_is_given_up(results: dict[str, Result]) -> None:
    """After the time that it has for its first step."""
    assert results["hangs"].first_step_s is None and not results["hangs"].losses
    assert "did not answer ('start',) within 0 s" in results["hangs"].note


def test_checks_go_on_after_one_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or hangs in it, or may have ruined the device; others share a process."""
    report = Report(is_dry=False)
    with DeviceProcess("cpu", tmp_path, f"{steppers.__name__}:Looker") as process:
        look_at_device(process, time.monotonic, report, time.monotonic() + 60)
        names = ("one", "two", "dies", "raises", "three")
        run_checks(process, time.monotonic, names, report, time.monotonic() + 600)
        monkeypatch.setattr(device, "CHECK_LIMIT_S", 2.0)
        run_checks(process, time.monotonic, ("hangs",), report, time.monotonic() + 600)
    run_checks(process, time.monotonic, ("late",), report, time.monotonic() - 1)
    assert report.facts["gpu"] == "Fake GPU" and report.facts["copy_bytes_per_s"] == 1e12
    found = {check.name: check for check in report.checks}
    assert {name: check.state for name, check in found.items()} == {
        "doctor": "skipped",
        "one": "ok",
        "two": "ok",
        "dies": "failed",
        "raises": "failed",
        "three": "ok",
        "hangs": "failed",
        "late": "skipped",
    }
    assert found["one"].numbers["pid"] == found["two"].numbers["pid"] == report.facts["pid"]
    assert found["three"].numbers["pid"] != report.facts["pid"]
    assert "exit code 9" in found["dies"].text and "did not answer" in found["hangs"].text
